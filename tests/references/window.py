"""`window`: the mean of the highest finite scores of a window."""

from __future__ import annotations

import math
from typing import Any

from references.chunk import members_of

SMALL = {"size": 4}  # parameters for small layers


def pooled(part: Any, scores: list[list[float]], positions: list[list[int]]) -> list[list[float]]:
    found = []
    for head, held in zip(scores, positions, strict=True):
        own = []
        for score, position in zip(head, held, strict=True):
            own.append(unit_score(part, position, head, held) if math.isfinite(score) else score)
        found.append(own)
    return found


def unit_score(part: Any, position: int, scores: list[float], positions: list[int]) -> float:
    members = sorted(members_of(part, position, scores, positions), reverse=True)
    share = part.best if part.task.value == "given" else 1.0
    best = members[: max(1, math.floor(round(part.size * share, 6)))]
    return sum(best) / len(best)
