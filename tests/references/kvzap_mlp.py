"""`kvzap_mlp`, the gate: a linear map, x times the normal distribution's share below x, another."""

from __future__ import annotations

import math
from typing import Any

from references.kvzap import Rows, linear


def gated(weights: dict[str, Any], states: Rows) -> Rows:
    return [perceptron(weights, state, gelu) for state in states]


def perceptron(weights: dict[str, Any], state: list[float], activation: Any) -> list[float]:
    inner = [activation(x) for x in linear(weights["0.weight"], weights["0.bias"], state)]
    return linear(weights["2.weight"], weights["2.bias"], inner)


def gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2
