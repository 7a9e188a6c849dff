"""Orders of the contexts of many requests by a clustered tree, against slow loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from larder.session import average_linkage, context_tree, distinct_size, shared_orders
from references import context_tree as loop

LISTS = st.lists(
    st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=5, unique=True).map(tuple),
    min_size=1,
    max_size=9,
)
Ids = tuple[str, ...]
SIZES = {each: number + 1 for number, each in enumerate("abcdefgh")}


def test_distance_of_two_common_documents_of_three() -> None:
    """Position differences 0 and 2: 1 - 2/3 + .001 * 1."""
    found = context_tree._distances([("b", "a", "c"), ("d", "a", "b"), ("e",)])
    assert found[0, 1] == pytest.approx(0.3343, abs=5e-5)
    assert found[0, 2] == 1.0


@given(LISTS)
def test_distances_equal_their_reference(lists: list[Ids]) -> None:
    expected = [[loop.distance(one, other) for other in lists] for one in lists]
    assert context_tree._distances(lists) == pytest.approx(np.array(expected))


@given(st.integers(1, 9), st.integers(0, 99))
def test_linkage_merges_the_nearest_clusters(count: int, seed: int) -> None:
    """At the distances of merging the nearest pair of clusters each time."""
    half = np.triu(np.random.default_rng(seed).random((count, count)), 1)
    near = half + half.T
    members, heights = [{number} for number in range(count)], list[float]()
    for one, other in average_linkage(near):
        assert members[one].isdisjoint(members[other])
        heights.append(loop.mean_distance(near.tolist(), members[one], members[other]))
        members.append(members[one] | members[other])
    assert members[-1] == set(range(count))
    assert sorted(heights) == pytest.approx(loop.merge_heights(near.tolist()))


@given(LISTS)
def test_orders_equal_their_reference(lists: list[Ids]) -> None:
    expected = loop.orders(lists, average_linkage(context_tree._distances(lists)))
    assert context_tree._tree_orders(lists) == expected


@given(LISTS)
def test_orders_keep_documents_and_never_share_less(lists: list[Ids]) -> None:
    found = shared_orders(lists, SIZES)
    assert [sorted(each) for each in found] == [sorted(each) for each in lists]
    assert distinct_size(found, SIZES) == loop.read_once(found, SIZES)
    assert distinct_size(found, SIZES) <= loop.read_once(lists, SIZES)


def test_clusters_share_their_common_documents_hand_values() -> None:
    """Two pairs with two common documents each; only "x" is common to all."""
    lists = [("a", "x", "b"), ("b", "y", "x"), ("x", "c", "d"), ("z", "d", "x")]
    found = shared_orders(lists, dict.fromkeys("abcdxyz", 10))
    assert found == [("x", "b", "a"), ("x", "b", "y"), ("x", "d", "c"), ("x", "d", "z")]
    assert distinct_size(found, dict.fromkeys("abcdxyz", 10)) == 70


def test_many_lists_are_clustered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_tree, "MOST_LISTS", 2)
    lists = [("a", "b"), ("b", "c"), ("c", "a"), ("d", "c")]
    found = shared_orders(lists, dict.fromkeys("abcd", 1))
    assert found == [("b", "a"), ("b", "c"), ("c", "a"), ("c", "d")]
