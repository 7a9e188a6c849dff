"""Storage in which two neighboring layers share the directions of their entries (MiniCache).

Liu et al., "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models" (2024),
arXiv:2405.14366, section 4: from the middle of the model on, keys and values of two layers become
one direction, between theirs on the sphere, and two lengths; entries whose directions lie far
apart stay as they are. Known to us from the paper's abstract and secondary accounts; here an entry
is a token of one kv head. Differences: an entry must be held by both layers, so budgets that choose
alike in neighboring layers share most, and the latest entries are not shared. What is generated is
shared when the policy makes a plan. Where others are merged into a shared entry, the layer takes it
back, merges, and holds it by itself: the other layer still holds what both had, and the two are not
brought together again unless both have taken it back.

The bytes that it saves are not spent on more entries: this holds less than the budget allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from larder.core.arguments import require
from larder.core.observation import Entries, LayerScores
from larder.core.plan import Plan
from larder.core.spec import LayerPairing, LayerSpec
from larder.policy.storage._mixed_precision import kept_grades
from larder.policy.storage.base import Storage


@dataclass(frozen=True)
class MiniCache(Storage):
    """Pairs of layers hold one direction for what both hold.

    Args:
        start: share of the layers, counted from the first, that are not paired.
        weight: of the upper layer's direction in the shared one, in [0, 1].
        apart: the upper part of the range of angles between directions that is not shared.
        recent: latest entries of each head that are not shared.
    """

    start: float = 0.5
    weight: float = 0.6
    apart: float = 0.05
    recent: int = 32

    def __post_init__(self) -> None:
        LayerPairing(self.start, self.weight, self.apart)
        require(self.recent >= 0, "minicache.recent", "0 or more", self.recent)

    @property
    def form(self) -> str:
        return "paired"

    @property
    def pairing(self) -> LayerPairing:
        return LayerPairing(self.start, self.weight, self.apart)

    def full_precision_entries(self, quota: int, layer: LayerSpec, itemsize: int) -> int:
        return min(quota, self.recent)

    def grade(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        grades = kept_grades(plan, entries)
        start = 0
        for length in plan.lengths:
            grades[start : start + max(length - self.recent, 0)] = 1
            start += length
        return replace(plan, grades=grades)


Part = MiniCache
