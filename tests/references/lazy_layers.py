"""`lazy_layers`: the laziest layers go down to what is protected, until the rest fits."""

from __future__ import annotations

from typing import Any

from references.dynamic import evenly
from references.uniform import Layers, Measures, layer_tokens

__all__ = ["choose", "layer_tokens"]


def choose(
    part: Any, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    if set(layers) != set(quotas):
        return {}
    room = sum(quotas[index] * len(heads) for index, heads in layers.items())
    sizes = {index: sum(len(head) for head in heads) for index, heads in layers.items()}
    for index, heads in layers.items():
        if part.threshold < 1 and measures[index][0] > part.threshold:
            sizes[index] = least(heads)
    for to_nothing in (False, True):
        for index in sorted(layers, key=lambda index: -measures[index][0]):
            floor = 0 if to_nothing else least(layers[index])
            while sum(sizes.values()) > room and sizes[index] > floor:
                sizes[index] -= 1
    return {index: evenly(layers[index], size) for index, size in sizes.items()}


def least(heads: list[list[tuple[float, bool]]]) -> int:
    most = max(sum(shield for _, shield in head) for head in heads)
    return sum(min(most, len(head)) for head in heads)
