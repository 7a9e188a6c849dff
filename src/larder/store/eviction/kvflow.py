"""Eviction by the number of workflow steps until the next use.

Pan et al., "KVFlow: Efficient Prefix Caching for Accelerating LLM-Based Multi-Agent Workflows"
(2025), arXiv:2507.07400, section 3.1: a workflow knows how many steps there are until each of its
agents runs again. Candidates without a hint are evicted first, then those with the most steps; ties
are broken by the last use.

What differs: the caller's hints must give a prefix at most the steps of the candidates that
continue it. The server fetches what the next step uses (`larder.server.tiers.prefetch`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from larder.store.eviction.base import CandidateColumns, EvictionPolicy, FloatColumn


@dataclass(frozen=True)
class Kvflow(EvictionPolicy):
    """Steps to execution; without hints it equals `lru`."""

    prefetches: ClassVar[bool] = True

    def worth(self, candidates: CandidateColumns, now: float) -> FloatColumn:
        return -candidates.steps


Part = Kvflow
