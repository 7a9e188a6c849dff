"""`marconi`: both terms of each candidate, scaled by hand."""

from __future__ import annotations

from typing import Any

from larder.store import Candidate


def worths(part: Any, candidates: list[Candidate], now: float) -> list[float]:
    idle = [now - one.last_used if now - one.last_used > 1.0 else 1.0 for one in candidates]
    recent = scaled([1.0 / seconds for seconds in idle])
    saved = scaled([one.seconds / one.bytes for one in candidates])
    return [r + part.alpha * s for r, s in zip(recent, saved, strict=True)]


def scaled(values: list[float]) -> list[float]:
    low, high = sorted(values)[0], sorted(values)[-1]
    if low == high:
        return [0.0 for _ in values]
    return [(value - low) / (high - low) for value in values]
