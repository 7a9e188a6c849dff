"""Giving entries to heads one at a time, in proportion to weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

from references.choosing_loop import Ranked, beats


def by_weight(
    heads: Sequence[Sequence[Ranked]], weights: Sequence[float], count: int, base: int
) -> list[list[int]]:
    """Each time the head gets an entry that has fewest for its weight; of these, the better entry.

    What is protected goes first, and up to `base` entries beyond it every head counts alike.
    """
    top = max(weights, default=0.0)
    weights = [max(weight / top, 1e-9) if top > 0 else 1.0 for weight in weights]
    chosen: list[list[int]] = [[] for _ in heads]
    queues = [queue(head) for head in heads]
    for _ in range(min(count, sum(len(head) for head in heads))):
        open_heads = [h for h, waiting in enumerate(queues) if waiting]
        best = open_heads[0]
        for h in open_heads[1:]:
            turns = [turn(heads[i], chosen[i], queues[i][0], weights[i], base) for i in (h, best)]
            better = beats(heads[h][queues[h][0]], heads[best][queues[best][0]])
            if turns[0] < turns[1] or (turns[0] == turns[1] and better):
                best = h
        chosen[best].append(queues[best].pop(0))
    return [sorted(head) for head in chosen]


def turn(head: Sequence[Ranked], chosen: list[int], index: int, weight: float, base: int) -> float:
    if head[index][1]:
        return -math.inf
    position = sum(not head[i][1] for i in chosen) - base
    return float(position) if position < 0 else (position + 0.5) / weight


def queue(head: Sequence[Ranked]) -> list[int]:
    """Protected entries first, in order, then from the best on; of equals the earlier."""
    return sorted(
        range(len(head)), key=lambda i: (not head[i][1], 0.0 if head[i][1] else -head[i][0], i)
    )
