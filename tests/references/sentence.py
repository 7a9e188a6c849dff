"""`sentence`, the unit and the column: where a run of tokens without an end began; its mean."""

from __future__ import annotations

import math
from typing import Any

from builders import SENTENCE_TOKENS
from references.tally_loop import AttentionRecord


def remembered(record: AttentionRecord) -> dict[str, float]:
    return {"sentence": record.first + 1}


def pooled(part: Any, scores: list[list[float]], positions: list[list[int]]) -> list[list[float]]:
    return [
        [
            mean_of(position, head, held) if math.isfinite(score) else score
            for score, position in zip(head, held, strict=True)
        ]
        for head, held in zip(scores, positions, strict=True)
    ]


def mean_of(position: int, scores: list[float], positions: list[int]) -> float:
    members = [
        score
        for score, other in zip(scores, positions, strict=True)
        if other // SENTENCE_TOKENS == position // SENTENCE_TOKENS and math.isfinite(score)
    ]
    return sum(members) / len(members)
