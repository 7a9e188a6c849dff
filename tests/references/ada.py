"""`ada`: the best of each head up to its floor are safe, the rest of the layer is one pool."""

from __future__ import annotations

from typing import Any

from references.choosing_loop import best, pool
from references.uniform import Layers, Measures, layer_tokens

SMALL = {"safeguard": 0.5}  # parameters for small layers

__all__ = ["choose", "layer_tokens"]


def choose(
    part: Any, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    out = {}
    for index, heads in layers.items():
        floor = int(part.safeguard * quotas[index])
        safe = [
            [
                (score, shield or position in best(entries, floor))
                for position, (score, shield) in listed
            ]
            for entries in heads
            for listed in [list(enumerate(entries))]
        ]
        out[index] = pool(safe, quotas[index] * len(heads))
    return out
