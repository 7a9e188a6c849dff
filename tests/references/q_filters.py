"""`q_filters`: product of a key with its head's direction."""

from __future__ import annotations

from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of


def scores(part: Any, observation: Observation) -> list[list[float]]:
    del part
    entries, size = observation.entries, observation.layer.head_dim
    out = []
    for head in heads_of(observation):
        direction = observation.calibration["q_filters"][head * size : (head + 1) * size]
        rows = entries.keys[entries.rows(head)].tolist()
        out.append([sum(x * y for x, y in zip(row, direction, strict=True)) for row in rows])
    return out
