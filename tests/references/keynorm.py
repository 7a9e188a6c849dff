"""`keynorm`: minus the length of each key."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of


def scores(part: Any, seen: Observation) -> list[list[float]]:
    entries = seen.entries
    return [
        [-length(entries.keys[entries.starts[h] + s].tolist()) for s in range(entries.lengths[h])]
        for h in heads_of(seen)
    ]


def length(vector: list[float]) -> float:
    return math.sqrt(sum(x * x for x in vector))
