"""`composite`: rows of one entry per head, the best rows of all layers."""

from __future__ import annotations

import math

from references.choosing_loop import Ranked, best
from references.uniform import Layers, Measures, layer_tokens
from references.weighing_loop import queue

__all__ = ["choose", "layer_tokens"]


def choose(
    part: object, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    if set(layers) != set(quotas):
        return {}
    left = sum(quotas[index] * len(heads) for index, heads in layers.items())
    counts = dict.fromkeys(sorted(layers), 0)
    rows = {index: rows_of(heads) for index, heads in layers.items()}
    while True:
        open_layers = [index for index in counts if counts[index] < len(rows[index])]
        if not open_layers:
            break
        top = max(open_layers, key=lambda index: (rows[index][counts[index]][0], -index))
        left -= rows[top][counts[top]][1]
        if left < 0:
            break
        counts[top] += 1
    return {index: [best(head, counts[index]) for head in heads] for index, heads in layers.items()}


def rows_of(heads: list[list[Ranked]]) -> list[tuple[float, int]]:
    """Worth of the rows of a layer, and the number of their entries."""
    rows: list[tuple[float, int]] = []
    worth = math.inf
    for index in range(max(len(head) for head in heads)):
        row = [head[queue(head)[index]] for head in heads if len(head) > index]
        held = [math.inf if shield else score for score, shield in row]
        worth = min(worth, math.inf if math.inf in held else sum(held) / len(held))
        rows.append((worth, len(row)))
    return rows
