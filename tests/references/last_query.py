"""`last_query`: the newest query's weights, averaged over all heads that hold a position."""

from __future__ import annotations

from typing import Any

from larder.core import Observation
from references.attention_loop import group_of, heads_of, positions_of, weights


def scores(part: Any, observation: Observation) -> list[list[float]]:
    newest = observation.queries.shape[1] - 1
    weights_by_position: dict[int, list[float]] = {}
    for head in heads_of(observation):
        places = positions_of(observation.entries, head)
        for query_head in group_of(observation, head):
            row = weights(observation, query_head, newest, [True] * len(places))
            for place, weight in zip(places, row, strict=True):
                weights_by_position.setdefault(place, []).append(weight)
    means = {place: sum(row) / len(row) for place, row in weights_by_position.items()}
    return [
        [means[place] for place in positions_of(observation.entries, h)]
        for h in heads_of(observation)
    ]
