"""Mixed-precision storage: byte shares of several precisions, and demotion between them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int8
from torch import Tensor

from larder.core.codec import Codec
from larder.core.errors import BudgetError
from larder.core.memory_budget import count_of_tokens
from larder.core.observation import Entries, LayerScores
from larder.core.plan import Plan
from larder.core.spec import POSITION_BYTES, LayerSpec
from larder.core.spelling import spell
from larder.core.types import Packed
from larder.policy.storage.base import Storage

Grades = Int8[Tensor, " _"]


@dataclass(frozen=True)
class PrecisionTier:
    """Precision below the full one, and its share of the bytes."""

    codec: Codec
    share: float


class MixedPrecisionStorage(Storage):
    """Base of storages with full precision for some entries and less for others, in a byte budget.

    Entries are quantized a group at a time. Entries of an incomplete group stay at full precision
    (KIVI's residual window): space for one group per head is reserved first, the rest of the bytes
    is divided. A merge target returns to full precision until it is quantized again, so that a
    merge never requantizes its neighbors.
    """

    @abstractmethod
    def tiers(self) -> tuple[PrecisionTier, ...]:
        """Precisions below the full one, which gets the rest of the bytes."""

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return tuple(tier.codec for tier in self.tiers())

    @property
    def residual_window(self) -> int:
        """Entries per head at full precision until their group is full."""
        return max(codec.group for codec in self.codecs)

    def entries(self, tokens: int, layers: Sequence[LayerSpec], itemsize: int) -> int:
        self.check(layers, itemsize)
        spare = self.reserved_entries(layers, itemsize)
        if tokens <= self.residual_window + spare:
            raise BudgetError(
                f"The budget of {count_of_tokens(tokens)} is no more than the "
                f"{self.residual_window + spare} that {spell(self)} keeps at full precision until "
                "a group is full: raise the budget, or lower its group."
            )
        gains = [self._gain(layer.head_dim, itemsize) for layer in layers]
        return self.residual_window + int(
            (tokens - spare - self.residual_window) * min(gains, default=1.0)
        )

    def reserved_entries(self, layers: Sequence[LayerSpec], itemsize: int) -> int:
        """Bytes per head that hold no entries, counted in entries; 0 by default."""
        return 0

    def check(self, layers: Sequence[LayerSpec], itemsize: int) -> None:
        """Check that every precision saves bytes.

        Raises:
            BudgetError: a quantized entry would take as many bytes as an exact one.
        """
        for size in {layer.head_dim for layer in layers}:
            for codec in self.codecs:
                if _ratio(codec, size, itemsize) <= 1:
                    cost = codec.bytes_per_entry(size, itemsize)
                    raise BudgetError(
                        f"{spell(self)} may hold an entry of a head of size {size} in {cost:.0f} "
                        f"bytes, but at full precision it takes {full_bytes(size, itemsize)}: "
                        "raise its group, or leave it out."
                    )

    def full_precision_entries(self, quota: int, layer: LayerSpec, itemsize: int) -> int:
        return self.capacities(quota, layer.head_dim, itemsize)[0]

    def capacities(self, quota: int, head_dim: int, itemsize: int, share: float = 1.0) -> list[int]:
        """Entries per head at each grade but the last, which takes all others.

        Args:
            quota: entries per head over all grades.
            share: used share of the capacity at full precision; the rest stays empty.
        """
        beyond = max(quota - self.residual_window, 0) / self._gain(head_dim, itemsize)
        left = 1 - sum(tier.share for tier in self.tiers())
        sizes = [min(quota, self.residual_window) + int(share * left * beyond)]
        for tier in self.tiers()[:-1]:
            sizes.append(int(tier.share * beyond * _ratio(tier.codec, head_dim, itemsize)))
        return sizes

    def rank(self, scored: LayerScores, entries: Entries) -> Packed:
        """Rank of each entry for demotion, higher keeps its precision longer; the scores by
        default.
        """
        return scored.ranked()

    def grade(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        like = entries.empty_like
        sizes = self.capacities(quota, like.shape[1], like.dtype.itemsize, share)
        ranked, before = self.rank(scored, entries)[plan.kept], kept_grades(plan, entries)
        grades = assign_grades(plan, ranked, before, sizes, [codec.group for codec in self.codecs])
        return replace(plan, grades=grades, channels=scored.storage_statistics.channels)

    def _gain(self, head_dim: int, itemsize: int) -> float:
        """Average number of entries in the bytes of one at full precision."""
        tiers = self.tiers()
        left = 1 - sum(tier.share for tier in tiers)
        return left + sum(tier.share * _ratio(tier.codec, head_dim, itemsize) for tier in tiers)


def _ratio(codec: Codec, head_dim: int, itemsize: int) -> float:
    return full_bytes(head_dim, itemsize) / codec.bytes_per_entry(head_dim, itemsize)


def full_bytes(head_dim: int, itemsize: int) -> int:
    """Bytes of an entry at full precision, ledger columns excluded."""
    return 2 * head_dim * itemsize + POSITION_BYTES


def grades_of(entries: Entries) -> Grades:
    """Grade of each packed entry; 0 in caches of a single precision."""
    if not len(entries.grades):
        size = (sum(entries.lengths),)
        return torch.zeros(size, dtype=torch.int8, device=entries.positions.device)
    return entries.pack(entries.grades)


def kept_grades(plan: Plan, entries: Entries) -> Grades:
    """Grades of the entries that a plan keeps; 0 for merge targets."""
    grades = grades_of(entries)
    if len(plan.folds):
        grades = grades.index_fill(0, plan.folds.targets, 0)
    return grades[plan.kept]


def assign_grades(
    plan: Plan, ranked: Packed, before: Grades, capacities: Sequence[int], groups: Sequence[int]
) -> Grades:
    """New grades of kept entries; capacity is divided over heads in proportion to their kept
    entries.

    Args:
        ranked, before: ranks and present grades of the kept entries.
        capacities, groups: as in `demote_groups`; capacities per head, on average.
    """
    heads, total = len(plan.lengths), max(len(plan.kept), 1)
    counts = list(plan.lengths)
    parts = zip(torch.split(ranked, counts), torch.split(before, counts), strict=True)
    return torch.cat(
        [
            demote_groups(
                own, now, [size * heads * len(own) // total for size in capacities], groups
            )
            for own, now in parts
        ]
    )


def demote_groups(
    ranked: Packed, before: Grades, capacities: Sequence[int], groups: Sequence[int]
) -> Grades:
    """New grades of one head: entries over the capacity of a grade move to the next, lowest first.

    Whole groups move at once, so that a grade never exceeds its capacity and the next one gets
    groups. Of equal ranks the earlier entry moves.

    Args:
        ranked: higher keeps its precision longer.
        before: present grades.
        capacities: entries of each grade but the last.
        groups: group sizes of grade 1 and on.
    """
    grades = before.clone()
    for grade, (capacity, group) in enumerate(zip(capacities, groups, strict=True)):
        members = torch.nonzero(grades == grade).flatten()
        over = len(members) - capacity
        if over > 0:
            worst_first = torch.argsort(ranked[members], stable=True)
            grades[members[worst_first[: -(-over // group) * group]]] = grade + 1
    return grades
