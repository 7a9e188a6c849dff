"""Tiers of a graded layer at one moment, and the quantized tiers that follow from a plan.

Entries have indices over all tiers, the finest first (`TierOrder`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int8, Int32, Int64
from torch import Tensor

from larder.cache.merged_entries import MergedEntries, merge_by_index, no_merges
from larder.cache.quantized_tier import EncodingBatch, QuantizedTier, concat_tiers, encode_tier
from larder.cache.row_updates import HEAD_STRIDE, InsertedEntries
from larder.core.observation import Entries
from larder.core.part import Ledger
from larder.core.plan import Plan
from larder.core.types import empty_tensor
from larder.ops.packing import is_in_sorted, search_sorted, storage_rows
from larder.ops.quantized_attention import KVSide

CODING_CHUNK = 1 << 12  # entries encoded or dequantized at once
NO_WEIGHTS = torch.empty(0, 0)
NO_INDICES = torch.empty(0, dtype=torch.int64)
NO_COLUMNS: Mapping[str, Tensor] = MappingProxyType({})
KV_SIDES = {side.value: side for side in KVSide}


@dataclass(frozen=True)
class GradedTiers:
    """Snapshot of all entries of a layer.

    Args:
        finest: entries at full precision, as views.
        sums: merged entries that replace the numbers at some indices.
    """

    finest: Entries
    coded: tuple[QuantizedTier, ...]
    layout: TierOrder
    sums: MergedEntries

    @staticmethod
    def of(finest: Entries, coded: tuple[QuantizedTier, ...]) -> GradedTiers:
        """Snapshot before any plan."""
        return GradedTiers(finest, coded, TierOrder.of(finest, coded), no_merges(finest.keys))

    @cached_property
    def grades(self) -> Int8[Tensor, " T"]:
        """Grade of the numbers at each index; 0 for merged entries."""
        grades = self.layout.grades.clone()
        grades[self.sums.targets.cpu()] = 0
        return grades

    def numbers(
        self, indices: Int64[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        """Keys and values at some indices, each once, in float32 or better."""
        return self._numbers(indices, KVSide.KEYS), self._numbers(indices, KVSide.VALUES)

    def _numbers(self, indices: Int64[Tensor, " N"], side: KVSide) -> Float[Tensor, "N D"]:
        like = self.finest.keys
        dtype = torch.promote_types(like.dtype, torch.float32)
        numbers = like.new_empty(len(indices), like.shape[1], dtype=dtype)
        grades = self.layout.grades[indices]
        for grade in grades.unique().tolist():
            own = (grades == grade).nonzero().flatten()
            rows = self.layout.rows(grade, indices[own])
            numbers[own.to(like.device)] = self._decoded(grade, rows, side).to(dtype)
        if len(self.sums.targets):
            targets = self.sums.targets.cpu()
            summed = is_in_sorted(indices, targets).to(like.device)
            found = search_sorted(indices[summed.cpu()], targets).to(like.device)
            sums = self.sums.keys if side is KVSide.KEYS else self.sums.values
            numbers[summed] = sums[found].to(dtype)
        return numbers

    def as_entries(self) -> Entries:
        """Copy of all entries by head, then position; dequantized on first access."""
        order, device = self.layout.order, self.finest.keys.device
        counts = torch.bincount(self.layout.heads, minlength=len(self.finest.lengths))
        return LazyEntries.of(
            self.finest.keys[:0],
            self._decode_all,
            self.layout.positions[order].int().to(device),
            tuple(counts.tolist()),
            dict(zip(self.finest.columns, self._columns()[:, order.to(device)], strict=True)),
            self.finest.scalars,
            self.layout.grades[order].to(device),
        )

    def _decode_all(self, side: KVSide) -> Float[Tensor, "T D"]:
        """All keys or all values in packed order, in the cache's dtype."""
        parts = self.layout.order.split(CODING_CHUNK)
        return torch.cat([self._numbers(part, side).to(self.finest.keys.dtype) for part in parts])

    def with_columns(
        self, columns: Mapping[str, Float[Tensor, " _"]], ledger: Ledger
    ) -> list[Float[Tensor, "n _"]]:
        """All columns of each tier, some replaced by one number per packed entry."""
        held = self._columns(columns, self.layout.order, ledger)
        sizes = [sum(self.finest.lengths), *(len(tier) for tier in self.coded)]
        return [part.clone() for part in held.split(sizes, dim=1)]

    def with_merges(self, plan: Plan) -> GradedTiers:
        """Snapshot with the merged entries of a plan.

        Raises:
            CacheError: see `merge_entries`.
        """
        if not len(plan.folds):
            return self
        device = self.finest.keys.device
        return replace(self, sums=merge_by_index(plan, self.layout.order, self.numbers, device))

    def with_merged(self, sums: MergedEntries) -> GradedTiers:
        """Snapshot with merged entries, given by packed index."""
        if not len(sums.targets):
            return self
        indices, turn = self.layout.order[sums.targets.cpu()].sort()
        turn = turn.to(sums.keys.device)
        merged = MergedEntries(indices.to(turn.device), sums.keys[turn], sums.values[turn])
        return replace(self, sums=merged)

    def finest_change(
        self, plan: Plan, kept: Int64[Tensor, " T"], grades: Int8[Tensor, " T"], ledger: Ledger
    ) -> tuple[Plan, MergedEntries, InsertedEntries | None]:
        """Plan, merged entries and inserted entries of the finest tier.

        Args:
            kept, grades: indices of the kept entries, and their new grades.
        """
        exact, held = grades == 0, self.layout.grades[kept] == 0
        stays, promoted = kept[exact & held], kept[exact & ~held]
        counts = torch.bincount(self.layout.heads[stays], minlength=len(self.finest.lengths))
        there = (exact & held).to(plan.kept.device)
        columns = {name: part[there] for name, part in plan.columns.items()}
        own = Plan(stays, tuple(counts.tolist()), columns=columns, scalars=plan.scalars)
        inserted = self._inserted_entries(promoted, plan, kept, ledger) if len(promoted) else None
        return own, self.sums.among(stays), inserted

    def _inserted_entries(
        self, indices: Int64[Tensor, " N"], plan: Plan, kept: Int64[Tensor, " T"], ledger: Ledger
    ) -> InsertedEntries:
        """Entries that move from a quantized tier to full precision."""
        keys, values = self.numbers(indices)
        held = self._columns(plan.columns, kept, ledger)[:, indices.to(keys.device)]
        positions = self.layout.positions[indices].int().to(keys.device)
        return InsertedEntries(self.layout.heads[indices], keys, values, positions, held)

    def quantized_after(
        self,
        kept: Int64[Tensor, " T"],
        grades: Int8[Tensor, " T"],
        weights: Float[Tensor, "K D"] = NO_WEIGHTS,
        columns: Mapping[str, Tensor] = NO_COLUMNS,
        ledger: Ledger = Ledger(),  # noqa: B008, frozen and empty
    ) -> tuple[QuantizedTier, ...]:
        """Quantized tiers after a plan that keeps some entries, at the given grades.

        Args:
            weights: of the key channels of each head, or empty.
            columns: new numbers of the kept entries.

        Raises:
            CacheError: a number to quantize exceeds float16.
        """
        held = self._columns(columns, kept, ledger)
        tiers: list[QuantizedTier] = []
        counts = torch.bincount(grades, minlength=len(self.coded) + 1).tolist()
        for grade, tier in enumerate(self.coded, 1):
            if not len(tier) and not counts[grade]:
                tiers.append(tier)
                continue
            wanted = kept[grades == grade]
            stays = self.grades[wanted] == grade
            rows = self.layout.rows(grade, wanted[stays]).sort().values
            pooled = rows_to_reencode(
                tier, rows, self.layout.heads[wanted[~stays]], len(self.finest.lengths)
            )
            pool = self.layout.sorted(torch.cat([rows[pooled] + self.layout.starts[grade],
                                                 wanted[~stays]]))  # fmt: skip
            rows = rows[~pooled]
            if len(rows) == len(tier) and not len(pool):
                members = rows + self.layout.starts[grade]
            else:
                members = torch.cat([rows + self.layout.starts[grade], pool])
                tier = concat_tiers([tier.select(rows), *self._encoded(tier, pool, weights)])
            if columns or len(pool):
                tier = replace(tier, columns=held[:, members.to(held.device)])
            tiers.append(tier)
        return tuple(tiers)

    def _encoded(
        self, tier: QuantizedTier, indices: Int64[Tensor, " N"], weights: Float[Tensor, "K D1"]
    ) -> list[QuantizedTier]:
        """Entries encoded in new groups of their heads, in chunks."""
        counts = group_sizes(self.layout.heads[indices], tier.codec.group)
        most = max(CODING_CHUNK // tier.codec.group, 1)
        pieces: list[QuantizedTier] = []
        start = 0
        for sizes in counts.split(most):
            own = indices[start : start + int(sizes.sum())]
            start += len(own)
            if not len(own):
                continue
            keys, values = self.numbers(own)
            positions = self.layout.positions[own].int().to(keys.device)
            pool = EncodingBatch(keys, values, positions, self.layout.heads[own])
            like = self.finest.keys.dtype
            pieces.append(encode_tier(tier.codec, pool, sizes, weights, like, len(tier.columns)))
        return pieces

    def _decoded(self, grade: int, rows: Int64[Tensor, " N"], side: KVSide) -> Float[Tensor, "N D"]:
        if grade:
            coded = self.coded[grade - 1].rows
            return coded.side(side).decoded(rows, coded.groups_of(rows))
        layout = torch.tensor(self.finest.starts), torch.tensor(self.finest.lengths)
        there = storage_rows(rows, *layout).to(self.finest.keys.device)
        return (self.finest.keys if side is KVSide.KEYS else self.finest.values)[there]

    def _columns(
        self,
        changed: Mapping[str, Float[Tensor, " _"]] = NO_COLUMNS,
        indices: Int64[Tensor, " N"] = NO_INDICES,
        ledger: Ledger = Ledger(),  # noqa: B008, frozen and empty
    ) -> Float[Tensor, "n T"]:
        """Copy of all columns by index.

        Args:
            changed: columns that have new numbers at some indices.
        """
        device = self.finest.keys.device
        tiers = (tier.columns for tier in self.coded)
        held = torch.cat([self.finest.packed_columns(), *tiers], dim=1)
        for name, numbers in changed.items():
            held[ledger.columns.index(name), indices.to(device)] = numbers.to(held)
        return held


def rows_to_reencode(
    tier: QuantizedTier, rows: Int64[Tensor, " N"], incoming: Int64[Tensor, " M"], heads: int
) -> Bool[Tensor, " N"]:
    """Mask of the kept rows to encode again: those of groups that became small.

    A small group is kept if nothing else enters its head: one small group per head is allowed.

    Args:
        incoming: heads of the entries that enter the tier.
        heads: number of kv heads.
    """
    owners = tier.rows.lengths[:, 0].long()
    groups = tier.rows.groups_of(rows)
    counts = torch.bincount(groups, minlength=len(owners))
    small = (counts > 0) & (counts < tier.codec.min_group_entries)
    entering = torch.bincount(torch.cat([owners[small], incoming]), minlength=heads)
    return (small & (entering[owners] > 1))[groups]


def group_sizes(heads: Int64[Tensor, " N"], group: int) -> Int64[Tensor, " G"]:
    """Sizes of the full groups of every head, and of a smaller one for the rest."""
    sizes: list[int] = []
    for count in torch.bincount(heads).tolist():
        sizes += [group] * (count // group) + [count % group] * (count % group > 0)
    return torch.tensor(sizes, dtype=torch.int64)


@dataclass(frozen=True)
class TierOrder:
    """Heads, positions and grades of all entries, by index.

    Args:
        heads, positions, grades: of the entry at each index.
        order: the index of each packed entry.
        starts: the first index of each tier, the finest first.
    """

    heads: Int64[Tensor, " T"]
    positions: Int64[Tensor, " T"]
    grades: Int8[Tensor, " T"]
    order: Int64[Tensor, " T"]
    starts: tuple[int, ...]

    @staticmethod
    def of(finest: Entries, tiers: Sequence[QuantizedTier]) -> TierOrder:
        """Order with the entries of the finest tier first, then those of the others."""
        kv_heads = torch.arange(len(finest.lengths))
        owners = torch.repeat_interleave(kv_heads, torch.tensor(finest.lengths))
        heads = torch.cat([owners, *(tier.rows.heads() for tier in tiers)])
        positions = [finest.packed_positions(), *(tier.positions for tier in tiers)]
        packed = torch.cat([part.cpu().long() for part in positions])
        sizes = torch.tensor([len(part) for part in positions])
        grades = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int8), sizes)
        order = (heads * HEAD_STRIDE + packed).argsort()
        starts = (sizes.cumsum(0) - sizes).tolist()
        return TierOrder(heads, packed, grades, order, tuple(starts))

    def rows(self, grade: int, indices: Int64[Tensor, " N"]) -> Int64[Tensor, " N"]:
        """Tier rows at indices of that tier."""
        return indices - self.starts[grade]

    def sorted(self, indices: Int64[Tensor, " N"]) -> Int64[Tensor, " N"]:
        """Places in packed order."""
        ranks = torch.empty_like(self.order)
        ranks[self.order] = torch.arange(len(self.order))
        return indices[ranks[indices].argsort()]


class LazyEntries(Entries):
    """Copy of a layer's entries whose keys and values are computed on first access.

    Positions, columns and grades are there at once: many policies read nothing else. Valid until
    the layer changes.
    """

    _like: Tensor
    _compute: Callable[[KVSide], Tensor]

    @staticmethod
    def of(
        like: Float[Tensor, "0 D"],
        compute: Callable[[KVSide], Tensor],
        positions: Int32[Tensor, " T"],
        lengths: tuple[int, ...],
        columns: Mapping[str, Float[Tensor, " T"]],
        scalars: Mapping[str, Float[Tensor, " K"]],
        grades: Int8[Tensor, " T"],
    ) -> LazyEntries:
        """Packed entries, head by head.

        Args:
            compute: computes all keys, or all values.
        """
        entries = object.__new__(LazyEntries)  # __init__ would need keys and values
        vars(entries).update(
            _like=like,
            _compute=compute,
            positions=positions,
            starts=tuple(sum(lengths[:head]) for head in range(len(lengths))),
            lengths=lengths,
            columns=columns,
            scalars=scalars,
            rope_positions=empty_tensor(torch.int32, 0),
            grades=grades,
        )
        return entries

    def __getattr__(self, name: str) -> Tensor:
        if name not in KV_SIDES:
            raise AttributeError(name)
        vars(self)[name] = self._compute(KV_SIDES[name])
        return vars(self)[name]

    @property
    def empty_like(self) -> Float[Tensor, "0 D"]:
        return self._like

    def with_columns(self, columns: Mapping[str, Float[Tensor, " T"]]) -> LazyEntries:
        entries = object.__new__(LazyEntries)
        vars(entries).update(vars(self), columns={**self.columns, **columns})
        return entries
