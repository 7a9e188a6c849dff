"""Prioritized DCI in general form: what it promises, and what `dci` has of it."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from references import dci as tree
from references.prioritized import directions, nearest, outward

EVERY = 10**9


def drawn(count: int, dim: int, seed: int) -> list[list[float]]:
    source = Random(seed)
    return [[source.gauss(0.0, 1.0) for _ in range(dim)] for _ in range(count)]


def by_distance(points: list[list[float]], query: list[float]) -> list[int]:
    return sorted(range(len(points)), key=lambda at: (math.dist(points[at], query), at))


@settings(max_examples=20)
@given(
    count=st.integers(1, 40),
    composites=st.integers(1, 3),
    simples=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_search_without_limits_is_exact(count, composites, simples, seed) -> None:
    query, *points = drawn(count + 1, 5, seed)
    axes = directions(composites, simples, 5, seed)
    found, scored = nearest(points, query, 3, axes, EVERY, EVERY)
    assert found == by_distance(points, query)[:3]
    assert scored == count


@settings(max_examples=20)
@given(limit=st.integers(1, 30), seed=st.integers(0, 2**31))
def test_visit_limits_hold_above_the_requested_count(limit, seed) -> None:
    query, *points = drawn(61, 5, seed)
    axes = directions(2, 2, 5, seed)
    found, scored = nearest(points, query, 4, axes, limit, EVERY)
    assert len(found) == 4
    assert max(limit, 4) <= scored <= max(limit, 4) + 1  # both composite indices take a step
    assert nearest(points, query, 4, axes, EVERY, 1)[1] <= 5


def test_with_one_projection_the_nearest_projections_come_first() -> None:
    query, *points = drawn(31, 4, 1)
    axes = directions(1, 1, 4, 2)
    order = [at for _, at in outward(points, query, axes[0][0])]
    found, scored = nearest(points, query, 5, axes, 12, EVERY)
    assert scored == 12
    assert set(found) == set(sorted(order[:12], key=lambda at: math.dist(points[at], query))[:5])


def test_points_near_on_many_projections_are_nearer() -> None:
    hits = dict.fromkeys((1, 6), 0)
    for seed in range(30):
        query, *points = drawn(201, 6, seed)
        for simples in hits:
            axes = directions(1, simples, 6, seed)
            found, _ = nearest(points, query, 5, axes, 40, EVERY)
            hits[simples] += len(set(found) & set(by_distance(points, query)[:5]))
    assert hits[6] > hits[1] > 0


def test_lifted_keys_are_ranked_by_inner_product() -> None:
    query, *keys = drawn(41, 5, 3)
    radius = 1.05 * max(tree.dot(key, key) ** 0.5 for key in keys)
    points = [tree.lifted(key, radius) for key in keys]
    found, _ = nearest(points, tree.asked(query), 5, directions(2, 3, 6, 0), EVERY, EVERY)
    assert found == sorted(range(40), key=lambda at: -tree.dot(query, keys[at]))[:5]


@pytest.mark.parametrize("simples", [1, 7])
def test_directions_are_unit_vectors(simples) -> None:
    for simple in directions(2, simples, 9, 0):
        assert [tree.dot(axis, axis) for axis in simple] == pytest.approx([1.0] * simples)
