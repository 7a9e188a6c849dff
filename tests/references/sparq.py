"""SparQ in plain Python: few channels, a temperature for the rest, shares and means."""

from __future__ import annotations

import math
from collections.abc import Sequence

from references.lloyd import Vector, dot, mean
from references.recalling import Rows, largest, of_groups, softmax


def channels_of(group: Sequence[Vector], read: int) -> list[int]:
    return largest([sum(abs(query[d]) for query in group) for d in range(len(group[0]))], read)


def weights(
    queries: Sequence[Vector], keys: Sequence[Sequence[Vector]], read: int, scaling: float
) -> Rows:
    """The approximate attention of every query head."""
    group = len(queries) // len(keys)
    out = []
    for h, query in enumerate(queries):
        k = h // group
        channels = channels_of(queries[k * group : (k + 1) * group], read)
        few = [query[d] for d in channels]
        share = sum(map(abs, few)) / sum(map(abs, query))
        out.append(
            softmax(
                [
                    scaling / math.sqrt(share) * dot(few, [key[d] for d in channels])
                    for key in keys[k]
                ]
            )
        )
    return out


def scores(own: Rows, kv_heads: int) -> Rows:
    return of_groups(own, kv_heads)


def share(own: Sequence[float], chosen: Sequence[int]) -> float:
    """Share of a query head's approximate attention on the chosen entries."""
    return sum(own[entry] for entry in chosen) if own else 1.0


def mean_value(values: Sequence[Vector], width: int) -> list[float]:
    return mean(values) if values else [0.0] * width
