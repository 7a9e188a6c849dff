"""`last_query`: the newest query's weights, averaged over all heads that hold a position."""

from __future__ import annotations

from typing import Any

from larder.core import Observation
from references.attention_loop import group_of, heads_of, positions_of, weights


def scores(part: Any, seen: Observation) -> list[list[float]]:
    newest = seen.queries.shape[1] - 1
    said: dict[int, list[float]] = {}
    for head in heads_of(seen):
        places = positions_of(seen.entries, head)
        for query_head in group_of(seen, head):
            row = weights(seen, query_head, newest, [True] * len(places))
            for place, weight in zip(places, row, strict=True):
                said.setdefault(place, []).append(weight)
    means = {place: sum(row) / len(row) for place, row in said.items()}
    return [[means[place] for place in positions_of(seen.entries, h)] for h in heads_of(seen)]
