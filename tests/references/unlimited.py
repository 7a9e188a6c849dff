"""`unlimited`: everything stays."""

from __future__ import annotations

from references.uniform import Layers, layer_tokens

__all__ = ["choose", "layer_tokens"]


def choose(layers: Layers, quotas: dict[int, int]) -> dict[int, list[list[int]]]:
    return {
        index: [list(range(len(entries))) for entries in heads] for index, heads in layers.items()
    }
