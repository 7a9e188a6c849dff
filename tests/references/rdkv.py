"""`rdkv`: widths by water-filling, one entry and one level after the other."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Entries, LayerScores, Plan
from references.tiers_loop import standing

WIDTHS = (16, 8, 4, 2, 0)


def grades(
    part: Any, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
) -> list[int]:
    """One grade per kept entry: what it was, until widths are allocated."""
    held = standing(plan, entries)
    return [held[position] for position in plan.kept.tolist()]


def width(weight: float, level: float) -> int:
    """The permitted width nearest to the bits that are due; of two equally near the wider."""
    due = math.log2(weight / level) / 2 if 0 < weight < math.inf else weight
    return min(WIDTHS, key=lambda bits: (abs(bits - min(due, 16)), -bits))


def widths(weights: list[float], costs: dict[int, float], allowed: float) -> list[int]:
    """Widths at the lowest level that fits: just above a level at which a width changes."""
    turns = sorted(w / 4**edge for w in weights if 0 < w < math.inf for edge in (1, 3, 6, 12))
    for level in [turns[0] / 2, *(turn * (1 + 1e-9) for turn in turns)]:
        found = [width(weight, level) for weight in weights]
        if sum(costs[bits] for bits in found) <= allowed:
            return found
    raise AssertionError("nothing fits")
