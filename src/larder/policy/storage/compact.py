"""Storage that rotates keys to cache positions instead of text positions (StreamingLLM).

Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), arXiv:2309.17453,
section 3.2 (rolling cache): keys are held as they were before rotation, and at every step rotated
to 0, 1, 2, ... by their order in the cache, so that no distance exceeds what a model was trained on
however long the text. The released code does so once a cache is cut; here from the start, which is
the same, since nothing moves before. Layers that slide a window of their own keep true positions.
Only for models that turn keys as Larder knows; others are refused when the cache is made.

Behind `park()` it is what a step or block attends to, resident and recalled together, that stands
at positions without gaps, as in Liu et al., "ReAttention: Training-Free Infinite Context with
Finite Attention Scope" (2024), arXiv:2407.15176 (LongCache).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from larder.core.observation import Entries, LayerScores
from larder.core.plan import Plan
from larder.policy.storage.base import Storage


@dataclass(frozen=True)
class Compact(Storage):
    """Positions without gaps; everything at the precision of the model."""

    rerotates_keys: ClassVar[bool] = True

    @property
    def form(self) -> str:
        return "compact"

    def grade(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        return plan


Part = Compact
