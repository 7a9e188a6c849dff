"""Intervals agree with slow drawing and with what is known of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from larder.core import BadParameter
from larder.evaluation import Bootstrap, Interval, questions_as_clusters

FILES = [[1.0, 0.0, 1.0], [0.0, 0.0], [1.0], [0.5, 1.0, 0.0, 1.0]]
SCORES = st.lists(st.lists(st.floats(0, 1), max_size=4), min_size=1, max_size=5).filter(any)


def slow_mean(files: list[list[float]], bootstrap: Bootstrap) -> Interval:
    """Draw file by file, lay all their questions side by side, sort the means, count off."""
    generator = np.random.default_rng(bootstrap.seed)
    means = []
    for row in generator.integers(len(files), size=(bootstrap.resamples, len(files))):
        questions = [score for file in row for score in files[file]]
        means.append(sum(questions) / len(questions))
    means.sort()
    tail = (1 - bootstrap.coverage) / 2
    bounds = []
    for share in (tail, 1 - tail):
        index = share * (len(means) - 1)
        below, above = means[math.floor(index)], means[math.ceil(index)]
        bounds.append(below + (index % 1) * (above - below))
    everything = [score for file in files for score in file]
    return Interval(sum(everything) / len(everything), *bounds)


def test_mean_equals_its_reference() -> None:
    bootstrap = Bootstrap(resamples=321, coverage=0.9, seed=5)
    quick, slow = bootstrap.mean(FILES), slow_mean(FILES, bootstrap)
    assert (quick.mean, quick.low, quick.high) == pytest.approx((slow.mean, slow.low, slow.high))


def test_mean_counts_questions_not_files() -> None:
    assert Bootstrap().mean([[1.0], [0.0, 0.0, 0.0]]).mean == 1 / 4


def test_interval_of_two_files_hand_values() -> None:
    # Drawn with replacement: both the first (1/4), one of each (1/2), both the second (1/4).
    interval = Bootstrap(coverage=0.4).mean([[1.0], [0.0]])
    assert interval == Interval(0.5, 0.5, 0.5)
    assert Bootstrap(coverage=0.6).mean([[1.0], [0.0]]) == Interval(0.5, 0.0, 1.0)


def test_interval_of_a_fair_coin_matches_the_normal_approximation() -> None:
    interval = Bootstrap().mean(questions_as_clusters([0.0, 1.0] * 50))
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * 0.05, rel=0.06)


def test_correlated_questions_widen_the_interval() -> None:
    scores = [1.0] * 20 + [0.0] * 20
    together = Bootstrap().mean([scores[start : start + 10] for start in range(0, 40, 10)])
    alone = Bootstrap().mean(questions_as_clusters(scores))
    assert together.high - together.low > 2 * (alone.high - alone.low)


def test_difference_is_paired() -> None:
    better = [[score + 0.1 for score in file] for file in FILES]
    difference = Bootstrap().difference(better, FILES)
    assert (difference.mean, difference.low, difference.high) == pytest.approx((0.1, 0.1, 0.1))
    back = Bootstrap().difference(FILES, better)
    assert back.mean == pytest.approx(-0.1)


@given(SCORES)
def test_interval_is_seeded_ordered_and_ignores_empty_files(files: list[list[float]]) -> None:
    bootstrap = Bootstrap(resamples=50)
    interval = bootstrap.mean(files)
    assert interval == bootstrap.mean([file for file in files if file])
    assert interval.low <= interval.high
    assert 0 <= interval.low and interval.high <= 1 + 1e-12
    zero = bootstrap.difference(files, files)
    assert zero == Interval(0.0, 0.0, 0.0)


def test_different_seeds_give_different_intervals() -> None:
    files = questions_as_clusters(list(np.random.default_rng(0).random(30)))
    assert Bootstrap(seed=1).mean(files) != Bootstrap(seed=2).mean(files)


@pytest.mark.parametrize("files", [[], [[]]])
def test_mean_without_questions_is_refused(files: list[list[float]]) -> None:
    with pytest.raises(BadParameter, match="at least one scored question"):
        Bootstrap().mean(files)


def test_scores_must_be_numbers() -> None:
    with pytest.raises(BadParameter, match="finite scores"):
        Bootstrap().mean([[math.nan]])


def test_difference_of_different_questions_is_refused() -> None:
    with pytest.raises(BadParameter, match="got 1 files with 2 questions and 2 files with 2"):
        Bootstrap().difference([[1.0, 1.0]], [[1.0], [1.0]])


@pytest.mark.parametrize("bad", [{"resamples": 0}, {"coverage": 0.0}, {"coverage": 1.0}])
def test_parameters_out_of_range_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(BadParameter, match=f"bootstrap.{next(iter(bad))}"):
        Bootstrap(**bad)
