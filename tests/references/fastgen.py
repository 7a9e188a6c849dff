"""`fastgen`: the kind of an entry, and its mean weight as a fraction."""

from __future__ import annotations

from typing import Any

from larder.core import Observation
from references.attention_loop import group_of, heads_of, positions_of, weights
from references.recalling import largest

SMALL = {"attended": 0.5, "latest": 0.4, "window": 3}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    return [one_head(part, observation, head) for head in heads_of(observation)]


def one_head(part: Any, observation: Observation, head: int) -> list[float]:
    positions, start = positions_of(observation.entries, head), observation.entries.starts[head]
    queries = range(observation.queries.shape[1])[-part.window :]
    rows = [
        weights(
            observation,
            h,
            q,
            [position <= int(observation.query_positions[q]) for position in positions],
        )
        for h in group_of(observation, head)
        for q in queries
    ]
    means = [sum(row[s] for row in rows) / len(rows) for s in range(len(positions))]
    best = largest(means, int(part.attended * len(positions)))
    out = []
    for s, mean in enumerate(means):
        kind = round(float(observation.entries.columns["token_kind"][start + s]))
        is_latest = s >= len(positions) - int(part.latest * len(positions))
        level = {3: 4, 2: 3}.get(kind, 2 if s in best else int(is_latest))
        out.append(level + mean * (1 - 1e-6))
    return out
