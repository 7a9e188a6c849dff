"""`continuum`: every time to live that could be chosen is tried."""

from __future__ import annotations

from typing import Any

from larder.core import Variant
from larder.store import NUM_QUANTILES, Candidate


def worths(part: Any, candidates: list[Candidate], now: float) -> list[float]:
    memory = sum(one.bytes for one in candidates)
    return [worth(part, one, now, one.bytes / memory) for one in candidates]


def worth(part: Any, one: Candidate, now: float, share: float) -> float:
    best, until = 0.0, one.last_used
    rent = 1.0 if part.variant is Variant.PAPER else share * part.load
    for number in range(1, NUM_QUANTILES + 1):
        if not one.pauses:
            break
        time = after(sorted(one.pauses), number / NUM_QUANTILES)
        over = sum(pause <= time for pause in one.pauses) / len(one.pauses)
        gain = over * (one.seconds + part.eta * one.wait_seconds) - time * rent
        if gain > best:
            best, until = gain, one.last_used + time
    return best / one.bytes if now < until else one.last_used - now


def after(pauses: list[float], share: float) -> float:
    """The first time at which so large a share of pauses is over."""
    return next(t for n, t in enumerate(pauses, start=1) if n / len(pauses) >= share - 1e-9)
