"""`entropy_chunk`: chunks one after the other, with a budget of 1, 2, 3, ... entries."""

from __future__ import annotations

import math
from statistics import median_low
from typing import Any

SMALL = {"size": 4, "spiky": 2}  # parameters for small layers


def pooled(part: Any, scores: list[list[float]], positions: list[list[int]]) -> list[list[float]]:
    return [one_head(part, *head) for head in zip(scores, positions, strict=True)]


def one_head(part: Any, scores: list[float], positions: list[int]) -> list[float]:
    """An entry ranks by the least budget that it stays under."""
    own = [n for n, score in enumerate(scores) if math.isfinite(score)]
    chunks: dict[int, list[int]] = {}
    for n in own:
        chunks.setdefault(positions[n] // part.size, []).append(n)
    out = list(scores)
    for budget in range(len(own), 0, -1):
        for n in kept(part, scores, list(chunks.values()), budget):
            out[n] = float(len(own) + 1 - budget)
    return out


def kept(part: Any, scores: list[float], chunks: list[list[int]], budget: int) -> list[int]:
    means = [sum(scores[n] for n in chunk) / len(chunk) for chunk in chunks]
    evenness = [entropy([scores[n] for n in chunk]) for chunk in chunks]
    middle, even = median_low(means), median_low(evenness)
    stays = list[int]()
    for c in sorted(range(len(chunks)), key=lambda c: -means[c]):
        best = sorted(chunks[c], key=lambda n: -scores[n])
        count = part.spiky if means[c] >= middle and evenness[c] < even else len(best)
        stays += best[: min(count, budget - len(stays))]
    rest = sorted(
        (n for chunk in chunks for n in chunk if n not in stays), key=lambda n: -scores[n]
    )
    return stays + rest[: budget - len(stays)]


def entropy(scores: list[float]) -> float:
    if len(scores) == 1:
        return 0.0
    raised = [score - min(*scores, 0.0) for score in scores]
    shares = [score / (sum(raised) + 1e-8) for score in raised]
    found = -sum(share * math.log(share + 1e-8) for share in shares)
    return min(max(found / math.log(len(scores)), 0.0), 1.0)
