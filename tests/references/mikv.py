"""`mikv`: the best entries exact or at many bits, the others at few."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Entries, LayerScores, Plan
from references.tiers_loop import lowered, rooms


def grades(
    part: Any, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
) -> list[int]:
    """One grade per kept entry."""
    shares = [part.important, 1 - part.important] if part.high else [1 - part.important]
    tiers = list(zip(part.codecs, shares, strict=True))
    size, itemsize = entries.keys.shape[1], entries.keys.dtype.itemsize
    room = rooms(quota, part.group, tiers, size, itemsize)
    pairs = zip(scored.scores.tolist(), scored.protected.tolist(), strict=True)
    ranked = [math.inf if safe else score for score, safe in pairs]
    return lowered(plan, entries, ranked, room, [part.group] * len(tiers))
