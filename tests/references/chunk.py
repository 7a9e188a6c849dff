"""`chunk`: the mean of the finite scores of a chunk."""

from __future__ import annotations

import math
from typing import Any

SMALL = {"size": 3}  # parameters for small layers


def pooled(part: Any, scores: list[list[float]], positions: list[list[int]]) -> list[list[float]]:
    return [
        [
            unit_score(part, position, head, held) if math.isfinite(score) else score
            for score, position in zip(head, held, strict=True)
        ]
        for head, held in zip(scores, positions, strict=True)
    ]


def unit_score(part: Any, position: int, scores: list[float], positions: list[int]) -> float:
    members = members_of(part, position, scores, positions)
    return sum(members) / len(members)


def members_of(part: Any, position: int, scores: list[float], positions: list[int]) -> list[float]:
    """Finite scores of the entries in the unit of a place."""
    first = position - position % part.size
    return [
        score
        for score, other in zip(scores, positions, strict=True)
        if first <= other < first + part.size and math.isfinite(score)
    ]
