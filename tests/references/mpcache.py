"""MPCache in plain Python: a point per cluster, coarse clusters first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from references.lloyd import Vector, dot
from references.recalling import largest


def points(keys: Sequence[Vector], size: int, slant: float) -> list[list[float]]:
    return [
        [
            slant * max(channel) + (1 - slant) * min(channel)
            for channel in zip(*keys[at : at + size], strict=True)
        ]
        for at in range(0, len(keys), size)
    ]


def scores(
    query: Vector,
    keys: Sequence[Vector],
    page: int,
    coarse: int,
    kept: float,
    slant: float,
    count: int,
) -> dict[int, float]:
    """Of one query head, the score of every page in a coarse cluster that stays."""
    large = [dot(query, point) for point in points(keys, page * coarse, slant)]
    staying = max(math.ceil(kept * len(large)), math.ceil(count / coarse) + 1)
    stays = set(largest(large, staying))
    small = [dot(query, point) for point in points(keys, page, slant)]
    return {number: score for number, score in enumerate(small) if number // coarse in stays}
