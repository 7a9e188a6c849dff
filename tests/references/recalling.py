"""Functions shared by the loops of indexes: softmax, groups, and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from references.lloyd import Vector, dot

Rows = list[list[float]]


def softmax(logits: Sequence[float]) -> list[float]:
    if not logits:
        return []
    peak = max(logits)
    powers = [math.exp(logit - peak) for logit in logits]
    return [power / sum(powers) for power in powers]


def attention(queries: Sequence[Vector], keys: Sequence[Sequence[Vector]], scaling: float) -> Rows:
    """The weights of every query head over the keys of its kv head."""
    group = len(queries) // len(keys)
    return [
        softmax([scaling * dot(query, key) for key in keys[h // group]])
        for h, query in enumerate(queries)
    ]


def of_groups(rows: Rows, kv_heads: int) -> Rows:
    """Sums over the query heads of each kv head."""
    group = len(rows) // kv_heads
    return [
        [sum(column) for column in zip(*rows[k * group : (k + 1) * group], strict=True)]
        for k in range(kv_heads)
    ]


def largest(numbers: Sequence[float], count: int) -> list[int]:
    """Places of the largest, of equals the first."""
    return sorted(range(len(numbers)), key=lambda n: (-numbers[n], n))[:count]
