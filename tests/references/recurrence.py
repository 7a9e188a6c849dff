"""`recurrence`, the tally: when an entry was needed; the scorer: how soon it will be again."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of
from references.tally_loop import AttentionRecord


def remembered(record: AttentionRecord) -> dict[str, float]:
    last, longest = record.place - 1, 0
    for time, row in zip(record.times, record.weights, strict=True):
        if any(weight >= 0.0001 for weight in row):
            longest, last = max(longest, time - last), time
    return {"last_needed": float(last), "longest_gap": float(longest)}


def scores(part: Any, observation: Observation) -> list[list[float]]:
    return [one_head(observation, head) for head in heads_of(observation)]


def one_head(observation: Observation, head: int) -> list[float]:
    entries, now, out = observation.entries, observation.length - 1, []
    for row in range(entries.starts[head], entries.starts[head] + entries.lengths[head]):
        gap = float(entries.columns["longest_gap"][row])
        waited = now - float(entries.columns["last_needed"][row])
        often = 0.0 if gap == 0 else 2 / (1 + math.exp(gap - 1))
        late = 1 + waited / (gap + 1e-5)
        out.append(often + (2 / (1 + math.exp(late)) if late < 700 else 0.0))
    return out
