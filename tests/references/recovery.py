"""`recovery`: every head keeps the fewest kinds that recover a share; the share is tried out."""

from __future__ import annotations

from typing import Any

from references.choosing_loop import Ranked, pool
from references.uniform import Layers, Measures, layer_tokens

__all__ = ["choose", "layer_tokens"]

KINDS = (4, 3, 2, 1, 0)


def choose(
    part: Any, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    if set(layers) != set(quotas):
        return {}
    order = sorted(layers)
    flat = [entries for index in order for entries in layers[index]]
    shares = [row for index in order for row in shares_of(layers[index], measures[index])]
    room = sum(quotas[index] * len(layers[index]) for index in order)
    kept = [[] for _ in flat]
    for least in sorted({0.0, *(share for row in shares for share in row)}, reverse=True):
        tried = [of_head(own, row, least) for own, row in zip(flat, shares, strict=True)]
        if sum(map(len, tried)) <= room:
            kept = tried
            break
    raised = [
        [(float("inf") if s in own else score, shield) for s, (score, shield) in enumerate(head)]
        for head, own in zip(flat, kept, strict=True)
    ]
    chosen = pool(raised, room)
    out: dict[int, list[list[int]]] = {}
    for index in order:
        out[index], chosen = chosen[: len(layers[index])], chosen[len(layers[index]) :]
    return out


def shares_of(heads: list[list[Ranked]], measure: Any) -> list[list[float]]:
    if len(measure) != 5 * len(heads):
        return [[0.0, 0.0, 0.0, 0.0, 1.0] for _ in heads]
    return [list(measure[5 * h : 5 * h + 5]) for h in range(len(heads))]


def of_head(entries: list[Ranked], shares: list[float], least: float) -> list[int]:
    """Entries of the first policy that recovers enough."""
    kind = next(kind for kind, share in zip(KINDS, shares, strict=True) if share >= least)
    return [s for s, (score, shield) in enumerate(entries) if not kind or score >= kind or shield]
