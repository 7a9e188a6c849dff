"""`persistence`, the tally: queries that gave less than an even share; the scorer: minus that."""

from __future__ import annotations

from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of
from references.tally_loop import AttentionRecord


def remembered(record: AttentionRecord) -> dict[str, float]:
    count = 0.0
    for time, row in zip(record.times, record.weights, strict=True):
        count *= 1 - 1 / 400
        count += sum(row) / len(row) < 1 / (time + 1)
    return {"unimportant": count}


def scores(part: Any, observation: Observation) -> list[list[float]]:
    column = observation.entries.columns["unimportant"]
    return [
        [-float(x) for x in column[observation.entries.rows(head)]]
        for head in heads_of(observation)
    ]
