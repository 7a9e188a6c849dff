"""Uses times the time to compute it again, per byte, on a clock that ages what is not used.

Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy"
(1998), HP Laboratories report HPL-98-69; for trees of prefixes Jin et al., "RAGCache: Efficient
Knowledge Caching for Retrieval-Augmented Generation" (2024), arXiv:2404.12457, section 5.1:

    worth = clock + uses * seconds / bytes

where the clock is what it was when the candidate was last used, and goes on to the worth of whoever
leaves. What was worth much long ago is thereby passed by what is worth little now.

What differs: who leaves because a newer state replaces it does not move the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.store.eviction.base import CandidateColumns, EvictionPolicy, FloatColumn


@dataclass(frozen=True)
class Gdsf(EvictionPolicy):
    """Frequency times cost per byte, above an aging clock."""

    def worth(self, held: CandidateColumns, now: float) -> FloatColumn:
        del now
        return held.clock + held.uses * held.seconds / held.bytes

    def clock(self, gone: FloatColumn) -> float:
        return float(gone.max(initial=0.0))


Part = Gdsf
