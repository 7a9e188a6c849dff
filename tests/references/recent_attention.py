"""`recent_attention`: what the latest queries give an entry, the last 1.2 times, over all heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from larder.core import Observation
from references.attention_loop import group_of, heads_of, positions_of, weights

SMALL = {"window": 3}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    judging = latest(part, observation)
    weights_by_position: dict[int, list[float]] = {}
    for head in heads_of(observation):
        positions = positions_of(observation.entries, head)
        for query_head in group_of(observation, head):
            row = judged(judging, query_head, positions)
            for position, weight in zip(positions, row, strict=True):
                weights_by_position.setdefault(position, []).append(weight)
    means = {position: sum(row) / len(row) for position, row in weights_by_position.items()}
    return [
        [means[position] for position in positions_of(observation.entries, h)]
        for h in heads_of(observation)
    ]


def latest(part: Any, observation: Observation) -> Observation:
    """The observation with the last queries, held ones and those of the pass, for its own."""
    held = [] if observation.latest is None else [observation.latest]
    queries = torch.cat([*(one.queries for one in held), observation.queries], 1)[:, -part.window :]
    positions = torch.cat([*(one.positions for one in held), observation.query_positions])[
        -part.window :
    ]
    keys = observation.keys.new_zeros(observation.layer.kv_heads, len(positions), queries.shape[2])
    return replace(observation, queries=queries, query_positions=positions, keys=keys)


def judged(observation: Observation, query_head: int, positions: list[int]) -> list[float]:
    total, count = [0.0] * len(positions), len(observation.query_positions)
    for query, at in enumerate(observation.query_positions.tolist()):
        factor = 1 + 0.2 * (query / (count - 1) if count > 1 else 0.0)
        visible = [position <= at for position in positions]
        if any(visible):
            row = weights(observation, query_head, query, visible)
            total = [a + factor * b for a, b in zip(total, row, strict=True)]
    return [number / count for number in total]
