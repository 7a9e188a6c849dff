"""`kvgrad`: the highest product of a weight, a projected value's norm and a gradient's norm."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.attention_loop import group_of, heads_of, plain_weights, positions_of, weights

SMALL = {"chunk": 7}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    start, stop = observation.span
    slopes, out = observation.inputs["gradients"].tolist(), []
    for head in heads_of(observation):
        positions = positions_of(observation.entries, head)
        judged = [start <= position < stop for position in positions]
        best = [0.0] * len(positions)
        for query_head in group_of(observation, head):
            written = [
                norm(observation, head, query_head, index) for index in range(len(positions))
            ]
            for query in range(observation.queries.shape[1]):
                if part.variant.value != "larder":
                    shared = [j or p < part.opening for j, p in zip(judged, positions, strict=True)]
                    row = plain_weights(observation, query_head, query, shared)
                elif any(judged):
                    row = weights(observation, query_head, query, judged)
                else:
                    continue
                for index, weight in enumerate(row):
                    best[index] = max(best[index], weight * written[index] * slopes[query])
        out.append([w if see else -math.inf for w, see in zip(best, judged, strict=True)])
    return out


def norm(observation: Observation, head: int, query_head: int, index: int) -> float:
    """Length of what an entry's value becomes behind a query head's output projection."""
    value = observation.entries.values[observation.entries.starts[head] + index].tolist()
    if "projection" in observation.inputs:
        matrix = observation.inputs["projection"][query_head].tolist()
        columns = range(len(matrix[0]))
        value = [sum(v * row[c] for v, row in zip(value, matrix, strict=True)) for c in columns]
    return math.sqrt(sum(number * number for number in value))
