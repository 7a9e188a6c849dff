"""`trim`: the gate is log sigmoid of a perceptron; the scorer multiplies it by the age."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.kvzap import Rows, column
from references.kvzap_mlp import perceptron


def gated(weights: dict[str, Any], states: Rows) -> Rows:
    rows = [perceptron(weights, state, lambda x: x / (1 + math.exp(-x))) for state in states]
    return [[log_sigmoid(x) for x in row] for row in rows]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def scores(part: Any, observation: Observation) -> list[list[float]]:
    del part
    return decayed(observation, "trim")


def decayed(observation: Observation, name: str) -> list[list[float]]:
    """Column times age, by head."""
    out = []
    for head, values in enumerate(column(observation, name)):
        positions = observation.entries.head_positions(head).tolist()
        out.append(
            [
                v * (observation.length - position)
                for v, position in zip(values, positions, strict=True)
            ]
        )
    return out
