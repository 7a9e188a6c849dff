"""`threshold`: of a head's best entries those that are worth a share of its very best."""

from __future__ import annotations

from typing import Any

from references.choosing_loop import best
from references.uniform import Layers, Measures, layer_tokens

SMALL = {"share": 0.3}  # parameters for small layers

__all__ = ["choose", "layer_tokens"]


def choose(
    part: Any, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    out: dict[int, list[list[int]]] = {}
    for index, heads in layers.items():
        out[index] = []
        for entries in heads:
            free = [score for score, shield in entries if not shield]
            lift = min([0.0, *free])
            edge = part.share * max([score - lift for score in free], default=0.0)
            chosen = best(entries, quotas[index])
            out[index].append([i for i in chosen if entries[i][1] or entries[i][0] - lift >= edge])
    return out
