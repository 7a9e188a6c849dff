"""`locret`, the scorer: what the column says; the gate: two linear maps around x * sigmoid(x)."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.kvzap import Rows, column
from references.kvzap_mlp import perceptron


def scores(part: Any, observation: Observation) -> list[list[float]]:
    del part
    return column(observation, "locret")


def gated(weights: dict[str, Any], states: Rows) -> Rows:
    return [perceptron(weights, state, lambda x: x / (1 + math.exp(-x))) for state in states]
