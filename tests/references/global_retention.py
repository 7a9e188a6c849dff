"""`global_retention`: a perceptron to some channels of each head, which all heads read alike."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.kvzap import Rows, linear
from references.kvzap_mlp import perceptron
from references.trim import decayed, log_sigmoid


def gated(weights: dict[str, Any], states: Rows) -> Rows:
    channels = len(weights["4.weight"][0])
    out = []
    for state in states:
        flat = [silu(x) for x in perceptron(weights, state, silu)]
        heads = [flat[first : first + channels] for first in range(0, len(flat), channels)]
        logits = [linear(weights["4.weight"], weights["4.bias"], head)[0] for head in heads]
        out.append([log_sigmoid(x) for x in logits])
    return out


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def scores(part: Any, observation: Observation) -> list[list[float]]:
    del part
    return decayed(observation, "global_retention")
