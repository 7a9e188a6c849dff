"""`pooled`: the heads of a layer share one pool."""

from __future__ import annotations

from references.choosing_loop import pool
from references.uniform import Layers, layer_tokens

__all__ = ["choose", "layer_tokens"]


def choose(layers: Layers, quotas: dict[int, int]) -> dict[int, list[list[int]]]:
    return {index: pool(heads, quotas[index] * len(heads)) for index, heads in layers.items()}
