"""`dynamic`: count each layer's entries among the best of all, then share by the counts."""

from __future__ import annotations

from typing import Any

from references.choosing_loop import Ranked, beats, best, pool
from references.sensitivity import shares
from references.uniform import Layers, Measures, layer_tokens

SMALL = {"most": 1.5, "least": 0.5}  # parameters for small layers

__all__ = ["choose", "layer_tokens"]


def choose(
    part: Any, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    order = sorted(layers)
    wholes = {i: [list(range(len(head))) for head in layers[i]] for i in order}
    if len(order) % part.every and len(order) < len(quotas):
        newest = order[-1]
        most = int(part.most * (quotas[newest] * len(layers[newest])))
        return wholes | {newest: evenly(layers[newest], most)}
    narrowest = min(len(heads) for heads in layers.values())
    room = sum(quota * len(layers.get(i, [[]] * narrowest)) for i, quota in quotas.items())
    sizes = tokens(part, [layers[i] for i in order], [quotas[i] for i in order], room)
    return {index: evenly(layers[index], size) for index, size in zip(order, sizes, strict=True)}


def tokens(part: Any, layers: list[list[list[Ranked]]], quotas: list[int], room: int) -> list[int]:
    """Entries of each layer so far, of the room of all."""
    alike = [quota * len(heads) for quota, heads in zip(quotas, layers, strict=True)]
    held = [sum(len(head) for head in heads) for heads in layers]
    if room >= sum(held):
        return held
    highs = [min(int(part.most * a), n) for a, n in zip(alike, held, strict=True)]
    if sum(highs) < room:
        highs = held
    lows, offered = [], []
    for heads, a, high in zip(layers, alike, highs, strict=True):
        protected = len(heads) * max(sum(shield for _, shield in head) for head in heads)
        lows.append(min(max(int(part.least * a), protected), a, high))
        chosen = evenly(heads, high)
        offered.append([heads[h][i] for h in range(len(heads)) for i in chosen[h]])
    counts = [float(len(taken)) for taken in pool(offered, sum(alike))]
    return rounded(room, counts, lows, highs)


def rounded(total: int, weights: list[float], lows: list[int], highs: list[int]) -> list[int]:
    """Shares within bounds, fractions to the largest remainders."""
    exact = shares(total, weights, lows, highs)
    sizes = [int(share + 1e-9) for share in exact]
    open_ones = [i for i in range(len(exact)) if sizes[i] < highs[i]]
    for i in sorted(open_ones, key=lambda i: (sizes[i] - exact[i], i))[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes


def evenly(heads: list[list[Ranked]], count: int) -> list[list[int]]:
    """In turns: every head gives its best that is left, the best of these first."""
    chosen: list[list[int]] = [[] for _ in heads]
    queues = [in_order(head) for head in heads]
    while count and any(queues):
        turn = [h for h, queue in enumerate(queues) if queue]
        while turn and count:
            top = turn[0]
            for h in turn:
                if beats(heads[h][queues[h][0]], heads[top][queues[top][0]]):
                    top = h
            turn.remove(top)
            chosen[top].append(queues[top].pop(0))
            count -= 1
    return [sorted(head) for head in chosen]


def in_order(head: list[Ranked]) -> list[int]:
    """Indices from the best on."""
    order: list[int] = []
    for size in range(1, len(head) + 1):
        order += [i for i in best(head, size) if i not in order]
    return order
