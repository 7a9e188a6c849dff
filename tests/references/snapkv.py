"""`snapkv`: summed votes of the last queries, smoothed over neighbors; voters stay."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.attention_loop import group_of, heads_of, highest, positions_of, weights

SMALL = {"window": 3, "kernel": 3}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    if part.variant.value == "code":
        lengths = observation.entries.lengths
        return [
            highest(observation, head, [True] * lengths[head]) for head in heads_of(observation)
        ]
    return [one_head(part, observation, head) for head in heads_of(observation)]


def one_head(part: Any, observation: Observation, head: int) -> list[float]:
    positions = positions_of(observation.entries, head)
    count = observation.queries.shape[1]
    voters = range(max(0, count - part.window), count)
    votes = [0.0] * len(positions)
    for query_head in group_of(observation, head):
        for query in voters:
            at = int(observation.query_positions[query])
            visible = [position <= at for position in positions]
            if any(visible):
                row = weights(observation, query_head, query, visible)
                votes = [a + b for a, b in zip(votes, row, strict=True)]
    first = int(observation.query_positions[voters[0]])
    votes = [0.0 if p >= first else v for p, v in zip(positions, votes, strict=True)]
    half = part.kernel // 2
    around = [votes[max(0, i - half) : i + half + 1] for i in range(len(votes))]
    mean = part.pool.value == "mean"
    pooled = [sum(near) / part.kernel if mean else max(near) for near in around]
    return [math.inf if p >= first else v for p, v in zip(positions, pooled, strict=True)]
