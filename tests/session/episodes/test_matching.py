"""Questions find the nearest episode; turns on nothing known so far are new."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from larder.core import BadParameter
from larder.session import (
    EpisodeMatch,
    MatchRule,
    calibrate_tau,
    cluster,
    is_new_topic,
    match_episode,
)
from references.session.clustering import Row, cosine
from references.session.matching import dot, slow_match, slow_tau

NEARNESS = {MatchRule.COSINE: cosine, MatchRule.DOT: dot}


def unit(rows: object) -> np.ndarray:
    array = np.asarray(rows, dtype=np.float32)
    return array / np.linalg.norm(array, axis=-1, keepdims=True)


def topics(seed: int, per_topic: int, first: int = 0, last: int = 4) -> np.ndarray:
    """Turns on the topics [first, last) out of 16 directions, shuffled."""
    generator = np.random.default_rng(seed)
    centers = np.repeat(np.eye(16)[first:last], per_topic, axis=0)
    return generator.permutation(unit(centers + 0.15 * generator.normal(size=centers.shape)))


def own_segments(rows: np.ndarray) -> list[tuple[int, ...]]:
    """Places of turns that are the segments themselves."""
    return [(index,) for index in range(len(rows))]


class TestMatch:
    @pytest.mark.parametrize("rule", MatchRule)
    @given(seed=st.integers(0, 999), num_episodes=st.integers(1, 8))
    def test_match_equals_its_reference(
        self, rule: MatchRule, seed: int, num_episodes: int
    ) -> None:
        generator = np.random.default_rng(seed)
        centroids = generator.normal(size=(num_episodes, 5)).astype(np.float32)
        question = unit(generator.normal(size=5))
        found = match_episode(question, centroids, rule)
        episode, similarity = slow_match(question.tolist(), centroids.tolist(), NEARNESS[rule])
        assert found.episode == episode
        assert found.similarity == pytest.approx(similarity, abs=1e-6)

    def test_dot_rule_favors_tight_episodes(self) -> None:
        loose, tight = [0.3, 0.0], [0.7, 0.7]
        question = unit([1.0, 0.3])
        centroids = np.array([loose, tight], np.float32)
        assert match_episode(question, centroids).episode == 0
        assert match_episode(question, centroids, MatchRule.DOT).episode == 1

    def test_equal_matches_take_the_first_episode(self) -> None:
        centroids = np.array([[0, 1], [1, 0], [1, 0]], np.float32)
        assert match_episode(unit([1, 0]), centroids) == EpisodeMatch(1, 1.0)

    def test_zero_centroid_has_similarity_zero(self) -> None:
        centroids = np.array([[0, 0], [0.1, 1]], np.float32)
        assert match_episode(unit([1, 0]), centroids).episode == 1
        assert match_episode(unit([1, 0]), centroids[:1]) == EpisodeMatch(0, 0.0)

    def test_match_without_episodes_is_refused(self) -> None:
        with pytest.raises(BadParameter, match="0 episodes"):
            match_episode(unit([1, 0]), np.zeros((0, 2), np.float32))


class TestTau:
    @pytest.mark.parametrize("quantile", [0.0, 0.05, 0.4, 1.0])
    def test_tau_equals_its_reference(self, quantile: float) -> None:
        turns, folds = topics(0, 3), 5
        deal = np.random.default_rng(3).permutation(len(turns)) % folds

        def form(rows: list[Row]) -> list[Row]:
            return cluster(np.array(rows, np.float32), 4, seed=3).centroids.tolist()

        expected = slow_tau(turns.tolist(), deal.tolist(), form, quantile)
        tau = calibrate_tau(turns, turns, own_segments(turns), 4, quantile, folds, seed=3)
        assert tau == pytest.approx(expected, abs=1e-5)

    def test_tau_of_held_out_turns_is_lower(self) -> None:
        turns = topics(1, 5)
        centroids = cluster(turns, 4).centroids
        own = np.quantile([match_episode(turn, centroids).similarity for turn in turns], 0.05)
        assert calibrate_tau(turns, turns, own_segments(turns)) < own

    def test_tau_separates_known_and_new_topics(self) -> None:
        known, later, other = topics(2, 12), topics(3, 25), topics(4, 25, first=4, last=6)
        tau, centroids = calibrate_tau(known, known, own_segments(known)), cluster(known).centroids
        new = [is_new_topic(match_episode(turn, centroids).similarity, tau) for turn in later]
        assert np.mean(new) < 0.15
        assert all(is_new_topic(match_episode(turn, centroids).similarity, tau) for turn in other)

    @pytest.mark.parametrize("num_turns", [0, 1])
    def test_tau_of_too_few_turns_admits_every_turn(self, num_turns: int) -> None:
        turns = topics(0, 1)[:num_turns]
        tau = calibrate_tau(turns, turns, own_segments(turns))
        assert not is_new_topic(-1.0, tau)

    def test_tau_of_two_turns_is_their_similarity(self) -> None:
        turns = unit([[1, 0], [1, 1]])
        assert calibrate_tau(turns, turns, own_segments(turns)) == pytest.approx(2**-0.5)

    def test_tau_excludes_centroids_of_the_own_segments(self) -> None:
        # Each turn says exactly what its two segments say, and no other segment says it.
        segments = np.repeat(np.eye(16, dtype=np.float32)[:8], 2, axis=0)
        indices = [(2 * number, 2 * number + 1) for number in range(8)]
        tau = calibrate_tau(segments, segments[::2], indices, 16, quantile=1.0)
        assert tau == pytest.approx(0.0)

    def test_tau_of_turns_admits_more_turns_than_tau_of_segments(self) -> None:
        segments = topics(2, 12)
        turns = unit(segments + 0.3 * np.random.default_rng(0).normal(size=segments.shape))
        later = topics(3, 50)
        later = unit(later + 0.3 * np.random.default_rng(1).normal(size=later.shape))
        centroids = cluster(segments).centroids
        tau = calibrate_tau(segments, turns, own_segments(segments))
        assert np.mean([match_episode(turn, centroids).similarity < tau for turn in later]) < 0.15
        of_segments = calibrate_tau(segments, segments, own_segments(segments))
        assert (
            np.mean([match_episode(turn, centroids).similarity < of_segments for turn in later])
            > 0.3
        )

    def test_similarity_equal_to_tau_is_not_new(self) -> None:
        assert not is_new_topic(0.5, 0.5)
        assert is_new_topic(0.49, 0.5)

    @pytest.mark.parametrize(("quantile", "folds"), [(-0.1, 5), (1.1, 5), (0.05, 1)])
    def test_invalid_quantiles_and_folds_are_refused(self, quantile: float, folds: int) -> None:
        with pytest.raises(BadParameter, match="tau"):
            calibrate_tau(
                topics(0, 2),
                topics(0, 2),
                own_segments(topics(0, 2)),
                quantile=quantile,
                folds=folds,
            )
