"""`keynorm`: minus the length of each key."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of


def scores(part: Any, observation: Observation) -> list[list[float]]:
    entries = observation.entries
    return [
        [-length(entries.keys[entries.starts[h] + s].tolist()) for s in range(entries.lengths[h])]
        for h in heads_of(observation)
    ]


def length(vector: list[float]) -> float:
    return math.sqrt(sum(x * x for x in vector))
