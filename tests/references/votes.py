"""Votes in plain Python: every head's attention, summed by position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from references.lloyd import Vector, dot
from references.recalling import Rows, attention, largest


def scores(
    queries: Sequence[Vector],
    keys: Sequence[Sequence[Vector]],
    positions: Sequence[Sequence[int]],
    scaling: float,
) -> Rows:
    """Of every kv head, the votes for the positions of its entries."""
    group = len(queries) // len(keys)
    votes: dict[int, float] = defaultdict(float)
    for h, row in enumerate(attention(queries, keys, scaling)):
        for position, weight in zip(positions[h // group], row, strict=True):
            votes[position] += weight
    return [[votes[position] for position in own] for own in positions]


def chosen(
    queries: Sequence[Vector],
    keys: Sequence[Sequence[Vector]],
    positions: Sequence[Sequence[int]],
    scaling: float,
    count: int,
) -> list[list[int]]:
    """Entries of every kv head that have most votes; of a block, `queries` are its means."""
    return [largest(votes, count) for votes in scores(queries, keys, positions, scaling)]


def cosine(one: Sequence[Vector], other: Sequence[Vector]) -> float:
    """Between the queries of all heads, as one vector."""
    flat, last = ([x for query in each for x in query] for each in (one, other))
    return dot(flat, last) / (dot(flat, flat) * dot(last, last)) ** 0.5
