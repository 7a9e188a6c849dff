"""`unlimited`: everything stays."""

from __future__ import annotations

from references.uniform import Layers, Measures, layer_tokens

__all__ = ["choose", "layer_tokens"]


def choose(
    part: object, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    return {
        index: [list(range(len(entries))) for entries in heads] for index, heads in layers.items()
    }
