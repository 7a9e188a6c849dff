"""Frequency times recompute cost per byte, on a clock that ages unused candidates.

Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy"
(1998), HP Laboratories report HPL-98-69; for trees of prefixes Jin et al., "RAGCache: Efficient
Knowledge Caching for Retrieval-Augmented Generation" (2024), arXiv:2404.12457, section 5.1:

    worth = clock + uses * seconds / bytes

where the clock is that of the candidate's last use. An eviction advances the tier's clock to the
worth of the victim, so that candidates of high worth that are no longer used are evicted in time.

What differs: superseded victims do not advance the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.store.eviction.base import CandidateColumns, EvictionPolicy, FloatColumn


@dataclass(frozen=True)
class Gdsf(EvictionPolicy):
    """Frequency times cost per byte, above an aging clock."""

    def worth(self, candidates: CandidateColumns, now: float) -> FloatColumn:
        return candidates.clock + candidates.uses * candidates.seconds / candidates.bytes

    def clock(self, victims_worth: FloatColumn) -> float:
        return float(victims_worth.max(initial=0.0))


Part = Gdsf
