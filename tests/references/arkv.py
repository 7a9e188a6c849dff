"""`arkv`: each layer's share of its entries exact, the others rounded."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Entries, LayerScores, Observation, Plan
from references.attention_loop import positions_of, weights
from references.tiers_loop import lowered


def grades(
    part: Any, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
) -> list[int]:
    """One grade per kept entry."""
    pairs = zip(scored.scores.tolist(), scored.protected.tolist(), strict=True)
    ranked = [math.inf if safe else score for score, safe in pairs]
    return lowered(plan, entries, ranked, [int(share * quota)], [part.group])


def preference(part: Any, observation: Observation) -> float:
    """A layer's preference, from single weights."""
    entropy = variance = kurtosis = 0.0
    queries = range(
        max(0, observation.queries.shape[1] - part.window), observation.queries.shape[1]
    )
    for query_head in range(observation.layer.query_heads):
        positions = positions_of(observation.entries, query_head // observation.layer.group)
        rows = []
        for query in queries:
            visible = [
                position <= int(observation.query_positions[query]) for position in positions
            ]
            rows.append(weights(observation, query_head, query, visible))
        for entry in range(len(positions)):
            column = [row[entry] for row in rows]
            mean = sum(column) / len(column)
            second = sum((weight - mean) ** 2 for weight in column)
            fourth = sum((weight - mean) ** 4 for weight in column)
            entropy -= sum(weight * math.log(weight) for weight in column if weight > 0)
            variance += second / (len(column) - 1)
            kurtosis += fourth / len(column) / max(second / len(column), 1e-8) ** 2
    return entropy ** (1 / part.tau1) * variance ** (1 / part.tau2) * kurtosis ** (1 / part.tau3)
