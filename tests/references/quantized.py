"""`quantized`: the latest exact, the others rounded."""

from __future__ import annotations

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
