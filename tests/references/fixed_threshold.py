"""`fixed_threshold`: of the pool of all heads what is above a number, and what is protected."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from references.uniform import Layers, Measures, layer_tokens

__all__ = ["choose", "layer_tokens"]


def choose(
    part: Any, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    pooled = import_module("references.global").choose(part, layers, quotas, measures)
    return {
        index: [
            [
                position
                for position in chosen
                if entries[position][1] or entries[position][0] >= part.score
            ]
            for entries, chosen in zip(layers[index], heads, strict=True)
        ]
        for index, heads in pooled.items()
    }
