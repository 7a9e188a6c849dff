"""`capkv`: relevance of a key times leverage of its value, with a capacity matrix in full."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.attention_loop import group_of, heads_of, positions_of
from references.expected import Matrix, dot, rotation, times
from references.keydiff import mean, unit

SMALL = {"tau": 1.5, "future": 5, "sinks": 2}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    return [one_head(part, observation, head) for head in heads_of(observation)]


def one_head(part: Any, observation: Observation, head: int) -> list[float]:
    positions, start = positions_of(observation.entries, head), observation.entries.starts[head]
    judged = [s for s, index in enumerate(positions) if index >= part.sinks]
    keys = [unit(observation.entries.keys[start + s].tolist()) for s in judged]
    values = [observation.entries.values[start + s].tolist() for s in judged]
    out = [math.inf] * len(positions)
    for s in judged:
        out[s] = 0.0
    for query_head in group_of(observation, head) if judged else []:
        anchor = unit(mean_query(part, observation, head, query_head))
        logits = [part.tau * dot(key, anchor) for key in keys]
        weights = [math.exp(logit - max(logits)) for logit in logits]
        size = range(len(values[0]))
        capacity = [
            [
                float(a == b)
                + sum((w + 1e-6) * v[a] * v[b] for w, v in zip(weights, values, strict=True))
                for b in size
            ]
            for a in size
        ]
        for s, weight, value in zip(judged, weights, values, strict=True):
            leverage = dot(value, solve(capacity, value))
            out[s] += weight * leverage / len(group_of(observation, head))
    return out


def mean_query(part: Any, observation: Observation, head: int, query_head: int) -> list[float]:
    at, true = (
        observation.effective_rope_positions[head].tolist(),
        observation.query_positions.tolist(),
    )
    counted = [q for q, index in enumerate(true) if index >= part.sinks] or range(len(true))
    unturned = [
        times(rotation(observation, -at[q]), observation.queries[query_head, q].tolist())
        for q in counted
    ]
    ahead = range(at[-1] + 1, at[-1] + 1 + part.future)
    return mean([times(rotation(observation, index), mean(unturned)) for index in ahead])


def solve(matrix: Matrix, right: list[float]) -> list[float]:
    """Gaussian elimination; the matrix is positive definite."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for pivot in range(size):
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            rows[below] = [b - factor * a for a, b in zip(rows[pivot], rows[below], strict=True)]
    out = [0.0] * size
    for pivot in reversed(range(size)):
        known = sum(rows[pivot][later] * out[later] for later in range(pivot + 1, size))
        out[pivot] = (rows[pivot][size] - known) / rows[pivot][pivot]
    return out
