"""`shot`, the unit and the column: as a sentence, with ends of paragraphs for ends of sentences."""

from __future__ import annotations

from typing import Any

from references import sentence
from references.tally_loop import AttentionRecord


def remembered(record: AttentionRecord) -> dict[str, float]:
    return {"shot": record.first + 1}


def pooled(part: Any, scores: list[list[float]], positions: list[list[int]]) -> list[list[float]]:
    return sentence.pooled(part, scores, positions)
