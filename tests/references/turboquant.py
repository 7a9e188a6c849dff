"""`turboquant`: the latest exact, the others rounded; levels of Lloyd and Max by plain loops."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Entries, LayerScores, Plan
from references.tiers_loop import lowered, positions, rooms


def grades(
    part: Any, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
) -> list[int]:
    """One grade per kept entry."""
    size, itemsize = entries.keys.shape[1], entries.keys.dtype.itemsize
    room = rooms(quota, part.group, [(part.codecs[0], 1.0)], size, itemsize)
    return lowered(plan, entries, positions(entries), room, [part.group])


def levels(bits: int, size: int, points: int = 2000, rounds: int = 300) -> list[float]:
    """Levels of least squared error for one number of a random direction."""
    grid = [-1 + (index + 0.5) * 2 / points for index in range(points)]
    density = [(1 - x * x) ** ((size - 3) / 2) for x in grid]
    count = 2**bits
    found = [(index + 0.5) * 2 / count - 1 for index in range(count)]
    found = [x * 2 / math.sqrt(size) for x in found]
    for _ in range(rounds):
        sums, masses = [0.0] * count, [0.0] * count
        for x, mass in zip(grid, density, strict=True):
            own = min(range(count), key=lambda index: abs(x - found[index]))
            sums[own] += x * mass
            masses[own] += mass
        found = [s / m if m else f for s, m, f in zip(sums, masses, found, strict=True)]
    return found
