"""Bounds in plain Python: a box per page, and the most that a query can make of it."""

from __future__ import annotations

from collections.abc import Sequence

from references.lloyd import Vector
from references.recalling import Rows


def box(keys: Sequence[Vector], digest: str) -> list[tuple[float, float]]:
    """Lowest and highest of each channel."""
    sides = []
    for channel in zip(*keys, strict=True):
        low, high = min(channel), max(channel)
        if digest == "arkvale":
            middle = (low + high) / 2
            radius = sum(abs(number - middle) for number in channel) / len(channel)
            low, high = middle - radius, middle + radius
        sides.append((low, high))
    return sides


def bound(query: Vector, sides: Sequence[tuple[float, float]]) -> float:
    return sum(max(q * low, q * high) for q, (low, high) in zip(query, sides, strict=True))


def scores(
    queries: Sequence[Vector], keys: Sequence[Sequence[Vector]], page: int, digest: str
) -> Rows:
    """Of every set, the score of each page."""
    group = len(queries) // len(keys)
    boxes = [[box(own[at : at + page], digest) for at in range(0, len(own), page)] for own in keys]
    own = [[bound(query, sides) for sides in boxes[h // group]] for h, query in enumerate(queries)]
    if digest == "quest":
        return own
    joined = []
    for p in range(max(map(len, boxes))):
        having = [row[p] for row in own if p < len(row)]
        joined.append(sum(having) / len(having))
    return [joined[: len(head)] for head in boxes]
