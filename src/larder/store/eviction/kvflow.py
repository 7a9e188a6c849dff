"""Who is needed in the most steps goes first.

Pan et al., "KVFlow: Efficient Prefix Caching for Accelerating LLM-Based Multi-Agent Workflows"
(2025), arXiv:2507.07400, section 3.1: a workflow knows how many steps there are until each of its
agents runs again. What has the most steps before it goes first, what nobody announced before that;
among equals who was used longest ago.

What differs: that a prefix is never further than the nearest of what continues it is up to whoever
sets the hints. What is fetched ahead for the next step is the tier's business, not this rule's.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.store.eviction.base import CandidateColumns, EvictionPolicy, FloatColumn


@dataclass(frozen=True)
class Kvflow(EvictionPolicy):
    """Steps to execution; without hints it equals `lru`."""

    def worth(self, held: CandidateColumns, now: float) -> FloatColumn:
        del now
        return -held.steps


Part = Kvflow
