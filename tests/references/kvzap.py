"""`kvzap`, the scorer: what the column says; the gate: products with a row, and a constant."""

from __future__ import annotations

from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of

COLUMNS = {"ridge": "kvzap", "mlp": "kvzap_mlp"}

Rows = list[list[float]]


def scores(part: Any, observation: Observation) -> list[list[float]]:
    return column(observation, COLUMNS[part.form.value])


def column(observation: Observation, name: str) -> list[list[float]]:
    entries = observation.entries
    return [
        [
            float(entries.columns[name][entries.starts[head] + index])
            for index in range(entries.lengths[head])
        ]
        for head in heads_of(observation)
    ]


def gated(weights: dict[str, Any], states: Rows) -> Rows:
    """A number for each state and kv head."""
    return [linear(weights["weight"], weights["bias"], state) for state in states]


def linear(weight: Rows, bias: list[float], state: list[float]) -> list[float]:
    return [
        sum(w * x for w, x in zip(row, state, strict=True)) + constant
        for row, constant in zip(weight, bias, strict=True)
    ]
