"""`kvflow`: the more steps there are, the less it is worth."""

from __future__ import annotations

from typing import Any

from larder.store import Candidate


def worths(part: Any, candidates: list[Candidate], now: float) -> list[float]:
    return [0.0 - one.steps for one in candidates]
