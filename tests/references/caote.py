"""`caote`: evict one entry, compute the head's output again, and see how far it is."""

from __future__ import annotations

import math
from typing import Any

from references.weights_loop import as_weights


def weighed(
    part: Any, scores: list[list[float]], values: list[list[list[float]]]
) -> list[list[float]]:
    out = []
    for head, weights in enumerate(as_weights(scores)):
        full = output(weights, values[head])
        row = []
        for entry, score in enumerate(scores[head]):
            left = [0.0 if other == entry else w for other, w in enumerate(weights)]
            moved = math.dist(full, output(left, values[head]))
            row.append(moved if math.isfinite(score) else score)
        out.append(row)
    return out


def output(weights: list[float], values: list[list[float]]) -> list[float]:
    """The mean of values by weights; 0 where nothing weighs anything."""
    total = sum(weights)
    size = len(values[0]) if values else 0
    if total == 0:
        return [0.0] * size
    return [
        sum(w * value[x] for w, value in zip(weights, values, strict=True)) / total
        for x in range(size)
    ]
