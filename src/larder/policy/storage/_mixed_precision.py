"""Bytes shared by precisions, and who goes down when a precision is full."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int8
from torch import Tensor

from larder.core.codec import Codec
from larder.core.errors import BudgetError
from larder.core.observation import Entries, LayerScores
from larder.core.plan import Plan
from larder.core.spec import POSITION_BYTES, LayerSpec
from larder.core.spelling import spell
from larder.core.types import Packed
from larder.policy.storage.base import Storage

Grades = Int8[Tensor, " _"]


@dataclass(frozen=True)
class PrecisionTier:
    """A precision below the full one, and its share of the bytes."""

    codec: Codec
    share: float


class MixedPrecisionStorage(Storage):
    """Full precision for some, less for the others, under the bytes of the budget.

    Entries are rounded a group at a time. Those that wait until their group is full stay at full
    precision: room for one group of waiting entries per head is set aside first, the rest of the
    bytes is shared. What others are merged into is new: it waits with the others, wherever it was
    held before, until it is rounded again; so a merge rounds no neighbor anew.
    """

    @abstractmethod
    def tiers(self) -> tuple[PrecisionTier, ...]:
        """The precisions below the full one, which has what they leave of the bytes."""

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return tuple(tier.codec for tier in self.tiers())

    @property
    def residual_window(self) -> int:
        """Entries per head that may wait for their group to be full."""
        return max(codec.group for codec in self.codecs)

    def entries(self, tokens: int, layers: Sequence[LayerSpec], itemsize: int) -> int:
        self.check(layers, itemsize)
        spare = self.reserved_entries(layers, itemsize)
        if tokens <= self.residual_window + spare:
            raise BudgetError(
                f"The budget of {tokens} tokens is no more than the {self.residual_window + spare} that "
                f"{spell(self)} keeps at full precision until a group is full: raise --budget, or "
                "lower its group."
            )
        gains = [self._gain(layer.head_dim, itemsize) for layer in layers]
        return self.residual_window + int((tokens - spare - self.residual_window) * min(gains, default=1.0))

    def reserved_entries(self, layers: Sequence[LayerSpec], itemsize: int) -> int:
        """Entries' worth of bytes per head that are kept free of entries; none by default."""
        del layers, itemsize
        return 0

    def check(self, layers: Sequence[LayerSpec], itemsize: int) -> None:
        """Raises: BudgetError: a coded entry would take as much room as an exact one."""
        for size in {layer.head_dim for layer in layers}:
            for codec in self.codecs:
                if _ratio(codec, size, itemsize) <= 1:
                    cost = codec.bytes_per_entry(size, itemsize)
                    raise BudgetError(
                        f"{spell(self)} may hold an entry of a head of size {size} in {cost:.0f} "
                        f"bytes, but at full precision it takes {_full_bytes(size, itemsize)}: "
                        "raise its group, or leave it out."
                    )

    def finest(self, quota: int, layer: LayerSpec, itemsize: int) -> int:
        return self.capacities(quota, layer.head_dim, itemsize)[0]

    def capacities(self, quota: int, head_dim: int, itemsize: int, share: float = 1.0) -> list[int]:
        """Entries per head at each grade but the last, which takes all others.

        Args:
            quota: entries per head in all.
            share: of the room at full precision; what is left of it stays empty.
        """
        beyond = max(quota - self.residual_window, 0) / self._gain(head_dim, itemsize)
        left = 1 - sum(tier.share for tier in self.tiers())
        rooms = [min(quota, self.residual_window) + int(share * left * beyond)]
        for tier in self.tiers()[:-1]:
            rooms.append(int(tier.share * beyond * _ratio(tier.codec, head_dim, itemsize)))
        return rooms

    def rank(self, scored: LayerScores, entries: Entries) -> Packed:
        """Who keeps its precision longest; by default who is kept longest."""
        del entries
        return scored.ranked()

    def grade(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        like = entries.empty_like
        rooms = self.capacities(quota, like.shape[1], like.dtype.itemsize, share)
        ranked, held = self.rank(scored, entries)[plan.kept], kept_grades(plan, entries)
        grades = assign_grades(plan, ranked, held, rooms, [codec.group for codec in self.codecs])
        return replace(plan, grades=grades, channels=scored.storage_statistics.channels)

    def _gain(self, head_dim: int, itemsize: int) -> float:
        """Entries that fit the bytes of one at full precision."""
        tiers = self.tiers()
        left = 1 - sum(tier.share for tier in tiers)
        return left + sum(tier.share * _ratio(tier.codec, head_dim, itemsize) for tier in tiers)


def _ratio(codec: Codec, head_dim: int, itemsize: int) -> float:
    return _full_bytes(head_dim, itemsize) / codec.bytes_per_entry(head_dim, itemsize)


def _full_bytes(head_dim: int, itemsize: int) -> int:
    return 2 * head_dim * itemsize + POSITION_BYTES


def grades_of(entries: Entries) -> Grades:
    """The grade of each packed entry; 0 in caches that know but one precision."""
    if not len(entries.grades):
        size = (sum(entries.lengths),)
        return torch.zeros(size, dtype=torch.int8, device=entries.positions.device)
    return entries.pack(entries.grades)


def kept_grades(plan: Plan, entries: Entries) -> Grades:
    """The grades of what a plan keeps: 0 for what others are merged into, which is new."""
    grades = grades_of(entries)
    if len(plan.folds):
        grades = grades.index_fill(0, plan.folds.targets, 0)
    return grades[plan.kept]


def assign_grades(
    plan: Plan, ranked: Packed, held: Grades, rooms: Sequence[int], groups: Sequence[int]
) -> Grades:
    """New grades of what a plan keeps; heads have room in proportion to what they keep.

    Args:
        ranked, held: of the kept entries.
        rooms, groups: as in `demote_groups`; rooms per head, on average.
    """
    heads, total = len(plan.lengths), max(len(plan.kept), 1)
    counts = list(plan.lengths)
    parts = zip(torch.split(ranked, counts), torch.split(held, counts), strict=True)
    return torch.cat(
        [
            demote_groups(own, now, [room * heads * len(own) // total for room in rooms], groups)
            for own, now in parts
        ]
    )


def demote_groups(
    ranked: Packed, held: Grades, rooms: Sequence[int], groups: Sequence[int]
) -> Grades:
    """New grades of one head's entries: what does not fit a grade goes to the next, worst first.

    As many go at once as make whole groups, so that a grade is never fuller than its room and the
    next one gets groups. Of equals the earlier goes.

    Args:
        ranked: higher keeps its precision longer.
        held: present grades.
        rooms: entries that fit each grade but the last.
        groups: entries that make a group, at grade 1 and on.
    """
    grades = held.clone()
    for grade, (room, group) in enumerate(zip(rooms, groups, strict=True)):
        here = torch.nonzero(grades == grade).flatten()
        over = len(here) - room
        if over > 0:
            worst_first = torch.argsort(ranked[here], stable=True)
            grades[here[worst_first[: -(-over // group) * group]]] = grade + 1
    return grades
