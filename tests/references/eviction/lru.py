"""`lru`: the time of the last use."""

from __future__ import annotations

from typing import Any

from larder.store import Candidate


def worths(part: Any, candidates: list[Candidate], now: float) -> list[float]:
    return [one.last_used for one in candidates]
