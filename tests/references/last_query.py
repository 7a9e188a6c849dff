"""`last_query`: the newest query's weights, averaged over all heads that hold a position."""

from __future__ import annotations

from typing import Any

from larder.core import Observation
from references.attention_loop import group_of, heads_of, positions_of, weights


def scores(part: Any, observation: Observation) -> list[list[float]]:
    newest = observation.queries.shape[1] - 1
    weights_by_position: dict[int, list[float]] = {}
    for head in heads_of(observation):
        positions = positions_of(observation.entries, head)
        for query_head in group_of(observation, head):
            row = weights(observation, query_head, newest, [True] * len(positions))
            for position, weight in zip(positions, row, strict=True):
                weights_by_position.setdefault(position, []).append(weight)
    means = {position: sum(row) / len(row) for position, row in weights_by_position.items()}
    return [
        [means[position] for position in positions_of(observation.entries, h)]
        for h in heads_of(observation)
    ]
