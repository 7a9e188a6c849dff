"""`cake`: the layers so far share the room of all by preference; a preference, weight by weight."""

from __future__ import annotations

import math
from typing import Any

import torch

from larder.core import LOG_COUNT
from references.choosing_loop import Ranked
from references.dynamic import evenly, rounded
from references.uniform import Layers, Measures, layer_tokens

__all__ = ["choose", "layer_tokens", "preference"]


def choose(
    part: Any, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    order = sorted(layers)
    narrowest = min(len(heads) for heads in layers.values())
    room = sum(quota * len(layers.get(i, [[]] * narrowest)) for i, quota in quotas.items())
    held = [sum(len(head) for head in layers[i]) for i in order]
    sizes = held
    if room < sum(held):
        lows = [floor(layers[i], quotas[i]) for i in order]
        sizes = rounded(room, [measures[i][0] for i in order], lows, held)
    return {index: evenly(layers[index], size) for index, size in zip(order, sizes, strict=True)}


def floor(heads: list[list[Ranked]], quota: int) -> int:
    most = max(sum(shield for _, shield in head) for head in heads)
    return min(most * len(heads), sum(len(head) for head in heads), quota * len(heads))


def preference(part: Any, observation: Any) -> float:
    """Entropy and variance of single weights, gathered in lists."""
    entries, group = (
        observation.entries,
        observation.layer.query_heads // observation.layer.kv_heads,
    )
    indices = observation.query_positions[-part.window :].tolist()
    entropy = variance = 0.0
    for query_head in range(observation.layer.query_heads):
        kv_head = query_head // group
        keys, positions = entries.head_keys(kv_head), entries.head_positions(kv_head).tolist()
        counts = entries.columns.get(LOG_COUNT, torch.zeros(len(entries.keys)))
        logs = counts[entries.rows(kv_head)].tolist()
        rows = []
        for query, position in zip(
            observation.queries[query_head, -part.window :], indices, strict=True
        ):
            powers = [
                math.exp(float(query @ key) * observation.layer.scaling + log)
                if at <= position
                else 0.0
                for key, at, log in zip(keys, positions, logs, strict=True)
            ]
            rows.append([power / (sum(powers) or 1.0) for power in powers])
        for column in range(len(positions)):
            if positions[column] >= indices[0]:
                continue
            weights = [row[column] for row in rows]
            entropy -= sum(weight * math.log(weight) for weight in weights if weight > 0)
            mean = sum(weights) / len(weights)
            spread = sum((weight - mean) ** 2 for weight in weights)
            variance += spread / max(len(weights) - 1, 1)
    return entropy ** (1 / part.tau1) * variance ** (1 / part.tau2)
