"""`criticality`: weight and epsilon, times the sum of a value's absolute numbers."""

from __future__ import annotations

import math
from typing import Any

from references.weights_loop import as_weights


def weighed(
    part: Any, scores: list[list[float]], values: list[list[list[float]]]
) -> list[list[float]]:
    out = []
    for head, weights in enumerate(as_weights(scores)):
        row = []
        for entry, weight in enumerate(weights):
            size = sum(abs(x) for x in values[head][entry])
            score = scores[head][entry]
            row.append((weight + part.epsilon) * size if math.isfinite(score) else score)
        out.append(row)
    return out
