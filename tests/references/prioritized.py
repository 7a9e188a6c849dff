"""Prioritized DCI in its general form: a slow reference for what one projection of `dci` is of.

Li and Malik, "Fast k-Nearest Neighbour Search via Prioritized DCI" (2017), arXiv:1703.00440: L
composite indices of m simple ones each. A simple index is all points in the order of their
projections on one direction. Each composite index visits, of its m simple ones, whose next point is
nearest to the query's projection; a point that all m have visited is scored by its true distance.
The search ends when at least k are scored and either limit is reached: points scored (`retrieved`)
or visits of a composite index (`visited`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

Vector = Sequence[float]


def directions(composites: int, simples: int, dim: int, seed: int) -> list[list[list[float]]]:
    """Unit vectors, drawn evenly over the sphere."""
    source = Random(seed)
    return [[_unit(source, dim) for _ in range(simples)] for _ in range(composites)]


def outward(points: Sequence[Vector], query: Vector, along: Vector) -> Iterator[tuple[float, int]]:
    """All points by the gap of their projections to the query's, the nearest first."""
    center = _dot(query, along)
    gaps = sorted((abs(_dot(point, along) - center), at) for at, point in enumerate(points))
    yield from gaps


def nearest(
    points: Sequence[Vector],
    query: Vector,
    count: int,
    axes: Sequence[Sequence[Vector]],
    retrieved: int,
    visited: int,
) -> tuple[list[int], int]:
    """The nearest points that the search meets, the nearest first, and how many it scored."""
    scored: dict[int, float] = {}
    orders = [[outward(points, query, along) for along in simple] for simple in axes]
    queues = [[(*next(order), at) for at, order in enumerate(simple)] for simple in orders]
    met: list[Counter[int]] = [Counter() for _ in axes]
    for queue in queues:
        heapq.heapify(queue)
    visits = 0
    while any(queues) and not (
        len(scored) >= count and (len(scored) >= retrieved or visits >= visited)
    ):
        visits += 1
        for composite, queue in enumerate(queues):
            if not queue:
                continue
            _, point, at = heapq.heappop(queue)
            met[composite][point] += 1
            if met[composite][point] == len(axes[composite]) and point not in scored:
                scored[point] = math.dist(points[point], query)
            follower = next(orders[composite][at], None)
            if follower is not None:
                heapq.heappush(queue, (*follower, at))
    best = sorted(scored, key=lambda point: (scored[point], point))
    return best[:count], len(scored)


def _unit(source: Random, dim: int) -> list[float]:
    drawn = [source.gauss(0.0, 1.0) for _ in range(dim)]
    length = math.sqrt(_dot(drawn, drawn))
    return [number / length for number in drawn]


def _dot(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
