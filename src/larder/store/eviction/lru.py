"""Least recently used.

No paper: the usual policy of stores, and the baseline of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.store.eviction.base import CandidateColumns, EvictionPolicy, FloatColumn


@dataclass(frozen=True)
class Lru(EvictionPolicy):
    """Eviction by last use alone."""

    def worth(self, candidates: CandidateColumns, now: float) -> FloatColumn:
        return candidates.last_used


Part = Lru
