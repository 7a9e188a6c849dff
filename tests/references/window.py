"""`window`: the mean of the highest finite scores of a window."""

from __future__ import annotations

import math
from typing import Any

SMALL = {"size": 4}  # parameters for small layers


def pooled(part: Any, scores: list[list[float]], positions: list[list[int]]) -> list[list[float]]:
    return [
        [
            unit_score(part, place, head, held) if math.isfinite(score) else score
            for score, place in zip(head, held, strict=True)
        ]
        for head, held in zip(scores, positions, strict=True)
    ]


def unit_score(part: Any, place: int, scores: list[float], positions: list[int]) -> float:
    first = place - place % part.size
    members = [
        score
        for score, other in zip(scores, positions, strict=True)
        if first <= other < first + part.size and math.isfinite(score)
    ]
    members.sort(reverse=True)
    best = members[
        : max(
            1, math.floor(round(part.size * (part.best if part.task.value == "given" else 1.0), 6))
        )
    ]
    return sum(best) / len(best)
