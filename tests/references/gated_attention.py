"""Attention under gates, one query after the other."""

from __future__ import annotations

import math

Rows = list[list[float]]


def decayed(queries: Rows, keys: Rows, values: Rows, scaling: float, betas: list[float]) -> Rows:
    """Logits of a query times beta^age, for one query head and its kv head."""
    out = []
    for t, query in enumerate(queries):
        logits = [betas[j] ** (t - j) * dot(query, keys[j]) * scaling for j in range(t + 1)]
        out.append(mixed([math.exp(x) for x in logits], values))
    return out


def masked(
    queries: Rows,
    keys: Rows,
    values: Rows,
    scaling: float,
    kept: list[bool],
    sinks: int = 0,
    recent: int = 1,
) -> Rows:
    """A query sees what is kept, the first tokens, and the latest, itself among them."""
    out = []
    for t, query in enumerate(queries):
        weights = [
            math.exp(dot(query, keys[j]) * scaling) * (kept[j] or j < sinks or t - j < recent)
            for j in range(t + 1)
        ]
        out.append(mixed(weights, values))
    return out


def excess(betas: list[float], capacity: float) -> float:
    """Mean over queries of the decayed entries beyond a capacity, over the tokens so far."""
    parts = []
    for t in range(len(betas)):
        held = sum(betas[j] ** (t - j) for j in range(t + 1))
        parts.append(max(0.0, held - capacity) / (t + 1))
    return sum(parts) / len(parts)


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def mixed(weights: list[float], values: Rows) -> list[float]:
    total = sum(weights)
    rows = zip(*values[: len(weights)], strict=True)
    return [sum(w * x for w, x in zip(weights, row, strict=True)) / total for row in rows]
