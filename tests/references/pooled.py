"""`pooled`: the heads of a layer share one pool."""

from __future__ import annotations

from references.choosing_loop import pool
from references.uniform import Layers, Measures, layer_tokens

__all__ = ["choose", "layer_tokens"]


def choose(
    part: object, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    return {index: pool(heads, quotas[index] * len(heads)) for index, heads in layers.items()}
