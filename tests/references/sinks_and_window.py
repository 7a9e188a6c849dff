"""`sinks_and_window`: recency, sinks above everything."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of, positions_of

SMALL = {"sinks": 2}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    return [
        [math.inf if p < part.sinks else float(p) for p in positions_of(observation.entries, head)]
        for head in heads_of(observation)
    ]
