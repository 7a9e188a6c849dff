"""`headkv`: a base for every head, the rest by what was measured of it."""

from __future__ import annotations

from typing import Any

from builders import head_numbers
from references.sensitivity import shares
from references.uniform import Layers, Measures
from references.weighing_loop import by_weight

SMALL = {"beta": 1.5}  # parameters for small layers


def choose(
    part: Any, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    chosen, average = {}, sum(quotas.values()) / len(quotas)
    for index, heads in layers.items():
        shielded = sum(shield for head in heads for _, shield in head) / len(heads)
        base = own_base(part, max(int(average - shielded), 0))
        weights = head_numbers(len(heads))
        chosen[index] = by_weight(heads, weights, quotas[index] * len(heads), base)
    return chosen


def layer_tokens(
    part: Any, tokens: int, layers: int, least: int, most: int, calibration: Any
) -> list[float]:
    if tokens >= most:
        return [float(tokens)] * layers
    scores = calibration[part.trial.value]
    each, deserved = len(scores) // layers, []
    base = own_base(part, tokens - least)
    for layer in range(layers):
        own = sum(scores[layer * each + head] for head in range(each))
        share = own / sum(scores) if sum(scores) > 0 else 1 / layers
        deserved.append(base + share * layers * (tokens - least - base))
    return [least + own for own in shares(layers * (tokens - least), deserved, 0, most - least)]


def own_base(part: Any, mean: int) -> int:
    """All but as many whole entries as fit into `mean`, each taking `beta`."""
    pool = 0
    while (pool + 1) * part.beta <= mean:
        pool += 1
    return mean - pool
