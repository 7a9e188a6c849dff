"""`minicache`: all but each head's latest entries are to be shared."""

from __future__ import annotations

from typing import Any

from larder.core import Entries, LayerScores, Plan
from references.tiers_loop import standing


def grades(
    part: Any, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
) -> list[int]:
    """One grade per kept entry."""
    held = standing(plan, entries)
    found: list[int] = []
    kept = plan.kept.tolist()
    for length in plan.lengths:
        for index in range(length):
            is_recent = length - index <= part.recent
            found.append(held[kept[len(found)]] if is_recent else 1)
    return found
