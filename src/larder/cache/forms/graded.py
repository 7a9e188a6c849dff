"""Graded layer: entries at several grades of precision.

    grade 0    a ragged tier as in `larder.cache.forms.ragged`: new and other unquantized entries
    grade g    a tier quantized with the g-th codec

An entry that is not merged only moves to coarser grades. Entries that enter a tier are encoded in
groups of their head, in order of position. When entries leave, the others keep their codes until
less than half of their group is left; such groups of a head are pooled with incoming entries and
encoded again from their dequantized numbers. So a quantized entry never costs more than one in
a half-full group, and demoting one entry at a time quantizes the same entries repeatedly:
demote many at once.

Merges sum dequantized entries in float32. The target of a merge leaves its group, whose other codes
and scales stay as they are, and is written as the new sum: at full precision, where it stays until
a plan quantizes it with others, or at once at the grade that this plan gives it, in a group with
the other entries that enter that tier.

Attention reads codes, never a whole dequantized layer; merges dequantize the entries they need, and
`entries` dequantizes all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.entry_columns import check_columns
from larder.cache.forms._composite import MixedLayer
from larder.cache.forms._graded_tiers import GradedTiers
from larder.cache.forms.base import AttentionCall
from larder.cache.forms.ragged import RaggedLayer
from larder.cache.merged_entries import MergedEntries
from larder.cache.quantized_tier import QuantizedTier, saved_tiers, tier_prefix
from larder.cache.row_updates import InsertedEntries, join_inserted
from larder.cache.spec import LayerOptions
from larder.cache.validation import check_channels, check_grades, check_kept
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.spec import LayerSpec
from larder.core.types import Queries
from larder.ops.quantized_attention import quantized_attention

# Applies a plan to a ragged layer, with merged and inserted entries.
PlanCarrier = Callable[[RaggedLayer, Plan, MergedEntries, InsertedEntries | None], None]


class GradedLayer(MixedLayer):
    """Per-head lengths and several precisions; rejected entries free memory.

    `entries` returns a copy as soon as any entry is quantized.
    """

    supports, requires = frozenset({"ledger", "codecs"}), frozenset({"codecs"})
    has_public_name = False

    def __init__(self, layer: LayerSpec, options: LayerOptions) -> None:
        super().__init__(layer, options)
        spec, like = options.spec, self._ragged.like
        columns = len(spec.ledger.columns)
        self._hold(tuple(QuantizedTier.nothing(codec, like, columns) for codec in spec.codecs))

    def apply(self, plan: Plan) -> None:
        check_kept(plan, self.lengths)
        tiers, own, sums, promoted = self._planned(plan)
        self._ragged.apply_folded(own, sums, promoted)
        self._replace(tiers)

    def evict(self, plan: Plan) -> None:
        check_kept(plan, self.lengths)
        tiers, own, sums, promoted = self._planned(plan)
        self._ragged.evict_folded(own, sums, promoted)
        self._replace(tiers)

    def write_columns(self, columns: Mapping[str, Float[Tensor, " C"]]) -> None:
        if not self._has_coded:
            self._ragged.write_columns(columns)
            return
        tiers = self._tiers()
        check_columns(columns, self._ragged.ledger, len(tiers.layout.order))
        noted = tiers.with_columns(columns, self._ragged.ledger)
        self._ragged.write_packed_columns(noted[0])
        pairs = zip(self._coded, noted[1:], strict=True)
        self._hold(tuple(replace(tier, columns=own) for tier, own in pairs))

    def truncate(self, length: int) -> None:
        coded = self._coded
        if self._has_coded:
            tiers = self._tiers()
            order = tiers.layout.order
            kept = order[tiers.layout.positions[order] < length]
            coded = tiers.quantized_after(kept, tiers.layout.grades[kept])
        self._ragged.truncate(length)
        self._hold(coded)

    def entries(self) -> Entries:
        finest = self._ragged.entries()
        if not self._has_coded:
            return finest
        return self._tiers().as_entries()

    @property
    def coded_bytes(self) -> int:
        """Bytes of the quantized tiers alone."""
        return sum(tier.nbytes for tier in self._coded)

    def state(self) -> dict[str, Tensor]:
        state = self._ragged.state()
        for grade, tier in enumerate(self._coded, 1):
            own = tier.state(self._ragged.ledger)
            state |= {f"{tier_prefix(grade)}{name}": tensor for name, tensor in own.items()}
        return state

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> GradedLayer:
        store = cls(layer, LayerOptions.of_state(state))
        store._adopt_ragged(state)
        ledger, size = store._ragged.ledger, layer.head_dim
        store._hold(tuple(QuantizedTier.adopt(tier, ledger, size) for tier in saved_tiers(state)))
        return store

    def _like(self) -> GradedLayer:
        copy = GradedLayer(self.layer, self.options)
        copy._hold(self._coded)
        return copy

    def _copy_tensors(self) -> None:
        ledger, size = self._ragged.ledger, self.layer.head_dim
        self._hold(tuple(QuantizedTier.adopt(t.state(ledger), ledger, size) for t in self._coded))

    def own_tensors(self) -> tuple[Tensor, ...]:
        coded = [tensor for tier in self._coded for tensor in tier.tensors().values()]
        return *coded, *(tier.columns for tier in self._coded if tier.columns.numel())

    @property
    def lengths(self) -> tuple[int, ...]:
        counts = torch.tensor(self._ragged.lengths)
        for tier in self._coded:
            counts = counts + tier.lengths(len(counts))
        return tuple(counts.tolist())

    @property
    def _is_mixed(self) -> bool:
        return self._has_coded

    @property
    def _has_coded(self) -> bool:
        return any(len(tier) for tier in self._coded)

    def _tiers(self) -> GradedTiers:
        finest = self._ragged.entries()
        return GradedTiers.of(finest, self._coded)

    def _other_calls(self, queries: Queries) -> list[AttentionCall]:
        column, sizes = self._bias_column, (self.layer.kv_heads, self.layer.scaling)
        biases = (None if column is None else tier.columns[column] for tier in self._coded)
        return [
            partial(quantized_attention, queries, tier.rows, *sizes, bias, self.layer.softcap)
            for tier, bias in zip(self._coded, biases, strict=True)
            if len(tier)
        ]

    def _planned(
        self, plan: Plan
    ) -> tuple[tuple[QuantizedTier, ...], Plan, MergedEntries, InsertedEntries | None]:
        """Quantized tiers after a plan; plan, merges and inserted entries of the finest tier.

        Raises:
            CacheError: the plan does not fit.
        """
        self._ragged.check_numbers(plan)
        check_channels(plan, self.layer)
        return self._changed(plan, self._tiers().with_merges(plan))

    def _changed(
        self, plan: Plan, tiers: GradedTiers
    ) -> tuple[tuple[QuantizedTier, ...], Plan, MergedEntries, InsertedEntries | None]:
        """`_planned`, after the merges of the plan."""
        kept = tiers.layout.order[plan.kept.cpu()]
        grades = check_grades(plan, tiers.grades[kept], len(self._coded))
        ledger = self._ragged.ledger
        coded = tiers.quantized_after(kept, grades, plan.channels, plan.columns, ledger)
        return coded, *tiers.finest_change(plan, kept, grades, ledger)

    def _change_own(
        self,
        plan: Plan,
        sums: MergedEntries,
        change: PlanCarrier,
        inserted: InsertedEntries | None = None,
    ) -> None:
        """Apply a validated plan, with merged and inserted entries computed by the caller.

        Args:
            sums: merged entries, by packed index.
        """
        coded, own, merged, promoted = self._changed(plan, self._tiers().with_merged(sums))
        change(self._ragged, own, merged, join_inserted(promoted, inserted))
        self._replace(coded)

    def _replace(self, coded: tuple[QuantizedTier, ...]) -> None:
        """Replace the quantized tiers, after everything that can fail."""
        pairs = [(a, b) for a, b in zip(self._coded, coded, strict=True) if a is not b]
        self.replaced_bytes = self._ragged.replaced_bytes + sum(
            old.nbytes + new.nbytes for old, new in pairs
        )
        self._hold(coded)

    def _hold(self, coded: tuple[QuantizedTier, ...]) -> None:
        self._coded = coded
        self._count_bytes()
        self.usage.set_entries(sum(map(len, coded)))


Part = GradedLayer
