"""`uniform`: every head keeps its own best."""

from __future__ import annotations

from references.choosing_loop import Ranked, best

Layers = dict[int, list[list[Ranked]]]
Measures = dict[int, tuple[float, ...]]


def layer_tokens(
    part: object, tokens: int, layers: int, least: int, most: int, calibration: object
) -> list[float]:
    return [float(tokens)] * layers


def choose(
    part: object, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    return {
        index: [best(entries, quotas[index]) for entries in heads]
        for index, heads in layers.items()
    }
