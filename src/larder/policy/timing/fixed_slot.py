"""Eviction of the entry at a fixed distance from the end, at every decode step (Elastic Cache).

Liu et al., "Efficient Inference of Vision Instruction-Following Models with Elastic Cache" (2024),
arXiv:2407.18121, its rule while text is generated: a cache of K entries takes a token in and then
deletes the entry at index K - 25. So of what was read all but the last 25 entries of a head stay
for good, and the newest 25 slide. The distance is the released code's.

That code deletes at so many steps as its ratio says, and the cache grows by the others; here a
budget is fixed, and an entry goes at every step once it is full. Several tokens that are read
together have as many entries go, from the same index on. What is protected beyond that distance
stays as well, and the entry before it goes. Where a head may hold no more than the distance, the
oldest go.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from larder.core.arguments import require
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.attention_reduction import AttentionReduction, NoAggregation, NoHeadRule
from larder.policy.scorers.base import ReducedScorer, Scorer
from larder.policy.timing.base import Timing

NEWEST = float(1 << 23)  # above any index; whole numbers are exact in float32 up to twice that


@dataclass(frozen=True)
class FixedSlot(Timing):
    """Plan after every token, by the order of entries alone.

    Args:
        distance: how many of a head's newest entries slide.
    """

    distance: int = 25

    def __post_init__(self) -> None:
        require(self.distance >= 1, "fixed_slot.distance", "at least 1", self.distance)

    def excess(self) -> int | None:
        return 0

    @cached_property
    def _scoring(self) -> ReducedScorer:
        return ReducedScorer(
            SlotOrder(self.distance), AttentionReduction(NoAggregation(), NoHeadRule())
        )

    @property
    def scoring(self) -> ReducedScorer | None:
        return self._scoring


@dataclass(frozen=True)
class SlotOrder(Scorer):
    """Newest entries first, then the others from the oldest on: the last of these goes."""

    distance: int

    def score(self, observation: Observation) -> Packed:
        device = observation.entries.positions.device
        ages = [torch.arange(n - 1, -1, -1, device=device) for n in observation.entries.lengths]
        since = torch.cat(ages).float()  # entries of the head behind each
        return torch.where(since < self.distance, NEWEST - since, since)


Part = FixedSlot
