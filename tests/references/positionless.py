"""LongCache's selection in plain Python: votes of heads without positions, widened to spans."""

from __future__ import annotations

from collections.abc import Sequence

from references.recalling import largest

SMALL = {"span": 1}  # parameters for small layers


def ranked_positions(
    rows: Sequence[Sequence[float]], positions: Sequence[Sequence[int]], best: int, span: int
) -> list[int]:
    """Positions in the order in which they are taken.

    Args:
        rows: products of each query head with the entries of its kv head.
        positions: position of each entry, by kv head.
    """
    group = len(rows) // len(positions)
    votes: dict[int, int] = {}
    top: dict[int, float] = {}
    for h, row in enumerate(rows):
        own = positions[h // group]
        for n in largest(row, best):
            votes[own[n]] = votes.get(own[n], 0) + 1
        for position, product in zip(own, row, strict=True):
            top[position] = max(product, top.get(position, product))
    taken: list[int] = []
    for center in sorted(top, key=lambda p: (-votes.get(p, 0), -top[p], p)):
        span_of = range(center - span // 2, center - span // 2 + span)
        taken += [position for position in span_of if position in top and position not in taken]
    return taken


def chosen(
    rows: Sequence[Sequence[float]],
    positions: Sequence[Sequence[int]],
    best: int,
    span: int,
    count: int,
) -> list[list[int]]:
    """Entries of each kv head: those it has of the positions, in their order."""
    order = ranked_positions(rows, positions, best, span)
    return [
        [own.index(position) for position in order if position in own][:count] for own in positions
    ]
