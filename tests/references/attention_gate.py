"""`attention_gate`: a softmax over the tokens so far, by query and head; then a sigmoid."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.kvzap import Rows, column, linear


def gated(weights: dict[str, Any], states: Rows) -> Rows:
    heads, inner = len(weights["output.bias"]), len(weights["query.bias"])
    size, still = inner // heads, [0.0] * inner
    queries = [linear(weights["query.weight"], weights["query.bias"], each) for each in states]
    keys = [linear(weights["key.weight"], still, each) for each in states]
    values = [linear(weights["value.weight"], weights["value.bias"], each) for each in states]
    out = []
    for t, query in enumerate(queries):
        flat = list[float]()
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            logits = [
                sum(a * b for a, b in zip(query[own], key[own], strict=True)) / math.sqrt(size)
                for key in keys[: t + 1]
            ]
            shares = [math.exp(x) for x in logits]
            flat += [
                sum(w * value[c] for w, value in zip(shares, values, strict=False)) / sum(shares)
                for c in range(own.start, own.stop)
            ]
        found = linear(weights["output.weight"], weights["output.bias"], flat)
        out.append([1 / (1 + math.exp(-x)) for x in found])
    return out


def scores(part: Any, observation: Observation) -> list[list[float]]:
    del part
    return column(observation, "attention_gate")
