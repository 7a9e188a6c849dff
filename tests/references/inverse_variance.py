"""`inverse_variance`: shares of one pool by each layer's variance, found once all are judged."""

from __future__ import annotations

import math
from typing import Any

from references.choosing_loop import best
from references.sensitivity import shares
from references.uniform import Layers, Measures, layer_tokens

__all__ = ["choose", "layer_tokens"]


def choose(
    part: Any, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    if set(layers) != set(quotas):
        return {}
    order = sorted(layers)
    split = tokens(
        part,
        [layers[i] for i in order],
        [quotas[i] for i in order],
        [measures[i][0] for i in order],
    )
    return {
        index: [best(entries, most) for entries in layers[index]]
        for index, most in zip(order, split, strict=True)
    }


def tokens(part: Any, layers: list[Any], quotas: list[int], spreads: list[float]) -> list[int]:
    """Entries per head of each layer."""
    heads = [len(layer) for layer in layers]
    parts = [1] * len(heads) if len(set(heads)) == 1 else heads
    longest = [max(len(head) for head in layer) for layer in layers]
    total = sum(q * p for q, p in zip(quotas, parts, strict=True))
    held = [n * p for n, p in zip(longest, parts, strict=True)]
    if total >= sum(held):
        return longest
    floors = []
    for layer, quota, n, p in zip(layers, quotas, longest, parts, strict=True):
        protected = max(sum(shield for _, shield in head) for head in layer)
        floors.append(min(min(quota, max(16, math.ceil(n / 100), protected)) * p, n * p))
    if part.variant.value == "code":
        for position in sorted({0, min(1, len(floors) - 1), len(floors) - 1}):
            room = max(total - sum(floors), 0)
            floors[position] += min(held[position] - floors[position], room)
    weights = [w * p for w, p in zip(deserved(part, spreads), parts, strict=True)]
    exact = shares(total, weights, floors, held)
    rounded = [int(share + 1e-9) for share in exact]
    left = total - sum(rounded)
    open_ones = [i for i in range(len(exact)) if rounded[i] < held[i]]
    for i in sorted(open_ones, key=lambda i: (rounded[i] - exact[i], i))[:left]:
        rounded[i] += 1
    return [n // p for n, p in zip(rounded, parts, strict=True)]


def deserved(part: Any, spreads: list[float]) -> list[float]:
    rule = part.rule.value
    if rule == "uniform":
        return [1.0] * len(spreads)
    if rule == "reciprocal":
        return [1 / spread for spread in spreads]
    if rule == "exponential_decay":
        ranks = [sum(o < s for o in spreads) for s in spreads]
        return [math.exp(-4 * rank / max(len(spreads) - 1, 1)) for rank in ranks]
    if part.variant.value != "larder":
        return [math.exp(-spread) for spread in spreads]
    return [(1 / math.sqrt(spread)) ** (1 / part.temperature) for spread in spreads]
