"""`curdkv`: squared lengths of key and value, each over the sum of a window of entries."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of, positions_of

SMALL = {"window": 3, "sinks": 2}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    return [one_head(part, observation, head) for head in heads_of(observation)]


def one_head(part: Any, observation: Observation, head: int) -> list[float]:
    rows, positions = observation.entries.rows(head), positions_of(observation.entries, head)
    keys = shares(part, observation.entries.keys[rows].tolist())
    values = shares(part, observation.entries.values[rows].tolist())
    by = part.by.value
    both = [
        {"product": k * v, "mean": (k + v) / 2, "keys": k, "values": v}[by]
        for k, v in zip(keys, values, strict=True)
    ]
    total = sum(both)
    return [
        math.inf if index < part.sinks else score / total
        for score, index in zip(both, positions, strict=True)
    ]


def shares(part: Any, rows: list[list[float]]) -> list[float]:
    squares = [sum(x * x for x in row) for row in rows]
    out = []
    for index, square in enumerate(squares):
        first = index - index % part.window
        out.append(square / sum(squares[first : first + part.window]))
    return out
