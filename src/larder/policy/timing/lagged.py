"""Delayed eviction: entries accumulate, then as many are evicted at once (LazyEviction).

Zhang et al., "LazyEviction: Lagged KV Eviction with Attention Pattern Observation for Efficient
Long Reasoning" (2025), arXiv:2506.15969: one decision per observation window, so that an entry may
be needed again before it is judged. MorphKV's released code (arXiv:2503.00979) waits likewise. The
cache holds up to `tokens` - 1 entries per head beyond its budget, where that code lets them pile
up until a window is full and the cache is over its capacity. Under a policy that recalls what it
parks, they are inside the budget: it is divided into what stays, `tokens` and the recalled pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.arguments import require
from larder.policy.timing.base import Timing


@dataclass(frozen=True)
class Lagged(Timing):
    """Plan for every `tokens` entries over the budget.

    Args:
        tokens: entries per kv head that go together; 1 is `every_step`.
    """

    tokens: int = 128

    def __post_init__(self) -> None:
        require(self.tokens >= 1, "lagged.tokens", "at least 1", self.tokens)

    def excess(self) -> int | None:
        return self.tokens - 1


Part = Lagged
