"""`global`: all heads of all layers share one pool, once all are judged."""

from __future__ import annotations

from references.choosing_loop import pool
from references.uniform import Layers, Measures, layer_tokens

__all__ = ["choose", "layer_tokens"]


def choose(
    part: object, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    if set(layers) != set(quotas):
        return {}
    order = sorted(layers)
    flat = [entries for index in order for entries in layers[index]]
    chosen = pool(flat, sum(quotas[index] * len(layers[index]) for index in order))
    out: dict[int, list[list[int]]] = {}
    for index in order:
        out[index], chosen = chosen[: len(layers[index])], chosen[len(layers[index]) :]
    return out
