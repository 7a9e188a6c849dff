"""Episodes are found, numbered by their first segment, and stood for by the nearest segments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from larder.core import BadParameter
from larder.session import choose_cluster_count, cluster, representatives
from references.session.clustering import (
    best_labels,
    cosine,
    slow_centroids,
    slow_representatives,
    slow_silhouette,
)


def unit(rows: object) -> np.ndarray:
    array = np.asarray(rows, dtype=np.float32)
    return array / np.linalg.norm(array, axis=1, keepdims=True)


def random_rows(seed: int, count: int, size: int = 3) -> np.ndarray:
    return unit(np.random.default_rng(seed).normal(size=(count, size)))


def topics(seed: int, sizes: tuple[int, ...], spread: float = 0.1) -> np.ndarray:
    """Rows around as many directions as there are sizes, shuffled."""
    generator = np.random.default_rng(seed)
    centers = np.repeat(np.eye(len(sizes), 8), sizes, axis=0)
    return generator.permutation(unit(centers + spread * generator.normal(size=centers.shape)))


class TestCluster:
    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_clusters_equal_the_best_partition(self, seed: int, count: int) -> None:
        rows = random_rows(seed, 7)
        assert cluster(rows, count).labels.tolist() == best_labels(rows.tolist(), count)

    @settings(max_examples=20)
    @given(st.integers(0, 99), st.integers(1, 20), st.integers(1, 8))
    def test_centroids_are_plain_means(self, seed: int, num_rows: int, count: int) -> None:
        rows = random_rows(seed, num_rows)
        clusters = cluster(rows, count)
        expected = slow_centroids(rows.tolist(), clusters.labels.tolist())
        np.testing.assert_allclose(clusters.centroids, expected, atol=1e-6)
        assert len(clusters.centroids) == min(count, num_rows)

    @settings(max_examples=20)
    @given(st.integers(0, 99), st.integers(1, 20), st.integers(1, 8))
    def test_members_are_every_segment_once(self, seed: int, num_rows: int, count: int) -> None:
        members = cluster(random_rows(seed, num_rows), count).members
        assert sorted(i for each in members for i in each) == list(range(num_rows))
        assert all(list(each) == sorted(each) and each for each in members)

    @settings(max_examples=20)
    @given(st.integers(0, 99))
    def test_episodes_are_numbered_by_their_first_segment(self, seed: int) -> None:
        firsts = [each[0] for each in cluster(random_rows(seed, 15), 4).members]
        assert firsts == sorted(firsts)

    def test_fewer_segments_than_clusters_get_one_each(self) -> None:
        assert cluster(random_rows(0, 3), 8).labels.tolist() == [0, 1, 2]

    def test_equal_segments_make_one_episode(self) -> None:
        clusters = cluster(np.tile(random_rows(0, 1), (5, 1)), 4)
        assert clusters.labels.tolist() == [0] * 5
        assert clusters.centroids.shape == (1, 3)

    def test_segments_equal_but_for_rounding_count_once(self) -> None:
        a, b = random_rows(1, 2, 384)
        rows = np.stack([a, b, a + 3e-8, b - 3e-8]).astype(np.float32)
        assert cluster(rows, 4).labels.tolist() == [0, 1, 0, 1]

    def test_equal_seeds_give_equal_clusters(self) -> None:
        rows = random_rows(3, 40)
        assert (cluster(rows, 5, seed=7).labels == cluster(rows, 5, seed=7).labels).all()

    @pytest.mark.parametrize(("num_rows", "count"), [(0, 4), (3, 0)])
    def test_invalid_counts_are_refused(self, num_rows: int, count: int) -> None:
        with pytest.raises(BadParameter, match="episodes"):
            cluster(np.zeros((num_rows, 2), np.float32), count)


class TestChooseCount:
    @pytest.mark.parametrize("num_topics", [2, 3, 5, 7])
    def test_silhouette_count_equals_the_number_of_topics(self, num_topics: int) -> None:
        assert choose_cluster_count(topics(0, (6,) * num_topics)) == num_topics

    @pytest.mark.parametrize("seed", range(2))
    def test_silhouette_count_equals_its_reference(self, seed: int) -> None:
        rows = random_rows(seed, 12)
        scores = {
            count: slow_silhouette(rows.tolist(), cluster(rows, count).labels.tolist())
            for count in range(2, 9)
        }
        assert choose_cluster_count(rows) == max(scores, key=lambda count: scores[count])

    def test_silhouette_count_is_within_the_range(self) -> None:
        assert choose_cluster_count(topics(0, (6,) * 5), range(2, 4)) in (2, 3)

    @pytest.mark.parametrize("num_rows", [1, 2])
    def test_few_segments_are_one_episode(self, num_rows: int) -> None:
        assert choose_cluster_count(random_rows(0, num_rows)) == 1

    def test_equal_segments_are_one_episode(self) -> None:
        assert choose_cluster_count(np.tile(random_rows(0, 1), (9, 1))) == 1


class TestRepresentatives:
    @settings(max_examples=20)
    @given(st.integers(0, 99), st.integers(1, 15), st.integers(1, 6), st.integers(1, 9))
    def test_representatives_equal_their_reference(
        self, seed: int, num_rows: int, num_episodes: int, count: int
    ) -> None:
        rows = random_rows(seed, num_rows)
        clusters = cluster(rows, num_episodes)
        for episode in range(len(clusters.centroids)):
            expected = slow_representatives(rows.tolist(), clusters.labels.tolist(), episode, count)
            assert list(representatives(rows, clusters, episode, count)) == expected

    def test_single_representative_is_the_nearest(self) -> None:
        rows = topics(1, (9, 5))
        clusters = cluster(rows, 2)
        (chosen,) = representatives(rows, clusters, 0, 1)
        center = clusters.centroids[0].tolist()
        nearness = {i: cosine(rows[i].tolist(), center) for i in clusters.members[0]}
        assert nearness[chosen] == max(nearness.values())

    def test_equal_representatives_are_ordered_by_index(self) -> None:
        rows = unit([[1, 0], [1, 0.2], [1, -0.2], [1, 0.2]])
        clusters = cluster(rows, 1)
        assert representatives(rows, clusters, 0, 2) == (0, 1)

    @pytest.mark.parametrize(("episode", "count"), [(2, 1), (-1, 1), (0, 0)])
    def test_invalid_episode_or_count_is_refused(self, episode: int, count: int) -> None:
        rows = topics(0, (4, 4))
        with pytest.raises(BadParameter):
            representatives(rows, cluster(rows, 2), episode, count)
