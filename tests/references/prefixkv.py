"""`prefixkv`: raise one coverage until the prefixes of all layers that reach it fill the room."""

from __future__ import annotations

from references.choosing_loop import Ranked, pool
from references.uniform import Layers, Measures, layer_tokens

__all__ = ["choose", "layer_tokens"]


def choose(
    part: object, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    if set(layers) != set(quotas):
        return {}
    room = sum(quotas[index] * len(layers[index]) for index in layers)
    left = [step for index in sorted(layers) for step in steps(index, layers[index])]
    sizes = dict.fromkeys(layers, 0)
    while left and room:
        first = min(left, key=lambda step: step[:3])
        left.remove(first)
        sizes[first[2]] += 1
        room -= 1
    return {index: pool(layers[index], sizes[index]) for index in layers}


def steps(index: int, heads: list[list[Ranked]]) -> list[tuple[float, float, int]]:
    """For each entry of a layer, from the best on: the share covered before it, and its depth."""
    entries = [entry for head in heads for entry in head]
    free = sorted((score for score, shield in entries if not shield), reverse=True)
    lift = min([0.0, *free])
    whole = sum(score - lift for score in free)
    safe = len(entries) - len(free)
    out = [(-1.0, position / len(entries), index) for position in range(safe)]
    covered = 0.0
    for position, score in enumerate(free):
        share = covered / whole if whole > 0 else 1.0
        out.append((share, (safe + position) / len(entries), index))
        covered += score - lift
    return out
