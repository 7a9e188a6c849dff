"""`gdsf`: a candidate at a time, and the clock that follows who leaves."""

from __future__ import annotations

from typing import Any

from larder.store import Candidate


def worths(part: Any, candidates: list[Candidate], now: float) -> list[float]:
    out = []
    for one in candidates:
        per_byte = one.seconds / one.bytes
        out.append(one.clock + sum(per_byte for _ in range(one.uses)))
    return out


def clock(gone: list[tuple[Candidate, float]]) -> float:
    now = 0.0
    for one, worth in gone:
        if not one.superseded and worth > now:
            now = worth
    return now
