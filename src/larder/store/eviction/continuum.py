"""Time to live while the tool that a session waits for is likely to return.

Li et al., "Continuum: Efficient and Robust Multi-Turn LLM Agent Scheduling with KV Cache
Time-to-Live" (2025), arXiv:2511.02230: a state gets the time to live t that makes most of

    P(pause <= t) * (seconds to have it again) - t * (its share of the memory) * load

over the pauses observed after such calls. Until then other candidates are evicted first.

What differs: the paper's first factor includes the wait in the queue, which a store does not know;
`load` weighs the second term instead. If all candidates are within their time to live, the paper
evicts the program that came last, this policy the candidate that gains the least per byte by the
sum above. Candidates without a time to live, or past it, are evicted by their last use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from larder.core.errors import BadParameter
from larder.store.eviction.base import NUM_QUANTILES, CandidateColumns, EvictionPolicy, FloatColumn

QUANTILE_SHARES = np.arange(1, NUM_QUANTILES + 1) / NUM_QUANTILES


@dataclass(frozen=True)
class Continuum(EvictionPolicy):
    """Time to live from predicted pauses.

    Args:
        load: seconds of computation that the whole tier saves per second.
    """

    load: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.load >= 0:
            raise BadParameter(f"continuum.load must be 0 or more, got {self.load}.")

    def worth(self, held: CandidateColumns, now: float) -> FloatColumn:
        worth = held.last_used - now  # at most 0
        longest = held.pauses[:, -1]
        known = np.flatnonzero((now < held.last_used + longest) & np.isfinite(longest))
        if not len(known):
            return worth
        rent = self.load * held.bytes[known] / held.bytes.sum()
        pauses = held.pauses[known]
        gains = QUANTILE_SHARES * held.seconds[known, None] - pauses * rent[:, None]
        best = gains.argmax(1)[:, None]
        gain = np.take_along_axis(gains, best, 1)[:, 0]
        until = held.last_used[known] + np.take_along_axis(pauses, best, 1)[:, 0]
        lives = (gain > 0) & (now < until)
        worth[known[lives]] = gain[lives] / held.bytes[known[lives]]
        return worth


Part = Continuum
