"""`fast_kvzip`, the scorer: what the column says; the gate: a softmax of one token among sinks."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.kvzap import Rows, column, linear


def scores(part: Any, observation: Observation) -> list[list[float]]:
    del part
    return column(observation, "fast_kvzip")


def gated(weights: dict[str, Any], states: Rows) -> Rows:
    return [one_token(weights, state) for state in states]


def one_token(weights: dict[str, Any], state: list[float]) -> list[float]:
    sinks, biases = weights["k_base"], weights["b"]
    kv_heads, group, channels = len(sinks), len(biases[0][0]), len(sinks[0][0][0])
    queries = linear(weights["q_proj.weight"], weights["q_proj.bias"], state)
    keys = linear(weights["k_proj.weight"], [0.0] * (kv_heads * channels), state)
    out = []
    for head in range(kv_heads):
        key = normed(keys[head * channels : (head + 1) * channels], weights["k_norm.weight"])
        shares = []
        for member in range(group):
            start = (head * group + member) * channels
            query = normed(queries[start : start + channels], weights["q_norm.weight"])
            own = dot(query, key) / math.sqrt(channels) + biases[head][0][member]
            others = [math.exp(dot(query, sink) / math.sqrt(channels)) for sink in sinks[head][0]]
            shares.append(math.exp(own) / (math.exp(own) + sum(others)))
        out.append(sum(shares) / group)
    return out


def normed(vector: list[float], weight: list[float]) -> list[float]:
    size = math.sqrt(sum(x * x for x in vector) / len(vector) + 1e-6)
    return [x / size * w for x, w in zip(vector, weight, strict=True)]


def dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
