"""Evictions behind a decode step over pages: columns, choice and removal, without a plan.

Kernels add the attention of the newest token to a column of every entry, and evict the entry of the
lowest number from each head that has one too many, for all sequences of a step and layer by layer.
How many entries a head has afterwards is known on the host before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int32
from torch import Tensor

from larder.cache.block_tables import BlockTables, LayerStep, StepAttention
from larder.core.part import LOG_COUNT
from larder.core.plan import StepColumn, StepMerging, StepRule
from larder.ops.column_statistics import GroupReduction
from larder.ops.packing import write_to_device
from larder.ops.page_eviction import EntryMerging, EvictionLimits, PagedEntries, evict_lowest
from larder.ops.pages import add_column_mass

if TYPE_CHECKING:
    from larder.cache.forms.paged import PagedLayer
    from larder.cache.sequence import SequenceCache

MASS = "mass"  # column that kernels add attention to
MOST = int(np.iinfo(np.int32).max)


def supports(rule: StepRule) -> bool:
    """True for evictions by accumulated attention, of entries that are dropped or merged."""
    return rule.is_accumulating and rule.columns == {StepColumn.MASS: MASS}


class LayerLimits(NamedTuple):
    """Entries of a layer that stay behind a step.

    Args:
        count: entries of each kv head.
        first: entries at true positions before it stay.
        last: number of latest tokens whose entries stay.
    """

    count: int = MOST
    first: int = 0
    last: int = 0


class PageEviction(NamedTuple):
    """Eviction from the pages of one sequence.

    Args:
        layers: limits by layer index; other layers have no column.
        merging: fate of rejected entries; None to drop them.
    """

    layers: Mapping[int, LayerLimits]
    merging: StepMerging | None


class EvictionTables:
    """Limits of the evictions of a step, at fixed addresses beside the tables of the step.

    Args:
        tables: of the step.
        merging: scalar and slack of merges; None where all sequences drop what they reject.
    """

    def __init__(self, tables: BlockTables, merging: StepMerging | None) -> None:
        self._tables, self.merging = tables, merging
        total, device = len(tables.lengths), tables.lengths.device
        # Of no segment yet: a run before the first update, as of a capture, changes no entry.
        numbers = torch.zeros(5, total, dtype=torch.int32, device=device)
        self._mask, self._counts, self._firsts, self._noted, self._stops = numbers
        self._spared_last = torch.zeros_like(self._mask)  # beside the newest token
        self._rates = torch.zeros(total, device=device)
        self._seen: dict[int, PageEviction] = {}

    def serves(self, merging: StepMerging | None) -> bool:
        """True for sequences that merge as given, at whatever rate, or drop."""
        own = self.merging
        if merging is None or own is None:
            return merging is None
        return (merging.scalar, merging.slack) == (own.scalar, own.slack)

    def update(self, evictions: Mapping[int, PageEviction]) -> None:
        """Set limits, behind `BlockTables.update`.

        Args:
            evictions: by sequence of the step; all others are left as they are.
        """
        if evictions != self._seen:
            self._write(evictions)
            self._seen = dict(evictions)
        torch.mul(self._tables.lengths, self._mask, out=self._noted)
        torch.sub(self._tables.positions, self._spared_last, out=self._stops)

    def _write(self, evictions: Mapping[int, PageEviction]) -> None:
        total = len(self._mask)
        mask, counts, firsts, last = np.zeros((4, total), np.int32)
        rates = np.zeros(total, np.float32)
        for sequence, eviction in evictions.items():
            for number, layer in enumerate(self._tables.layers):
                if layer not in eviction.layers:
                    continue
                own, limits = self._tables.segments(sequence, number), eviction.layers[layer]
                mask[own], counts[own], firsts[own] = 1, limits.count, limits.first
                last[own] = limits.last - 1
                rates[own] = 0.0 if eviction.merging is None else eviction.merging.rate
        targets = self._mask, self._counts, self._firsts, self._spared_last, self._rates
        for target, source in zip(targets, (mask, counts, firsts, last, rates), strict=True):
            write_to_device(target, source)

    def evict(self, seen: Mapping[int, StepAttention]) -> None:
        """Note the attention of a step in all layers, and evict.

        Args:
            seen: attention of each layer.
        """
        parts = (self._noted, self._counts, self._firsts, self._stops, self._rates)
        by_layer = zip(*(part.split(self._tables.sizes) for part in parts), strict=True)
        positions = self._tables.positions.split(self._tables.sizes)
        steps = self._tables.layers.items()
        for (layer, step), newest, (*limits, rates) in zip(steps, positions, by_layer, strict=True):
            self._evict_layer(step, seen[layer], EvictionLimits(*limits), rates, newest)

    def _evict_layer(
        self,
        step: LayerStep,
        seen: StepAttention,
        limits: EvictionLimits,
        rates: Float[Tensor, " S"],
        newest: Int32[Tensor, " S"],
    ) -> None:
        pages, table, merging = step.pages, step.tables.table, self.merging
        mass, spec = pages.column(MASS), pages.layer
        asked = seen.queries, pages.keys, table, limits.lengths, seen.lse, spec.scaling
        add_column_mass(mass, *asked, GroupReduction.SUM, step.biases, spec.softcap)
        state = None
        if merging is not None:
            thresholds, counts = pages.scalar(merging.scalar), pages.column(LOG_COUNT)
            state = EntryMerging(rates, merging.slack, thresholds, newest, counts)
        entries = PagedEntries(pages.keys, pages.values, pages.positions, pages.columns)
        evict_lowest(entries, mass, table, limits, state)


def common_merging(evictions: Mapping[int, PageEviction]) -> StepMerging | None:
    """Merging of some sequences of a step, which share scalar and slack; None where all drop."""
    found = (each.merging for each in evictions.values() if each.merging is not None)
    return next(found, None)


def set_evictions(tables: BlockTables, evictions: Mapping[int, PageEviction]) -> EvictionTables:
    """Set the limits of a step, behind `BlockTables.update`.

    Args:
        evictions: by sequence of the step.
    """
    merging, held = common_merging(evictions), tables.evictions
    if held is None or not held.serves(merging):
        held = tables.evictions = EvictionTables(tables, merging)
    held.update(evictions)
    return held


def evict_step(
    tables: BlockTables,
    seen: Mapping[int, StepAttention],
    caches: Sequence[SequenceCache],
    evictions: Mapping[int, PageEviction],
) -> None:
    """Evict behind a step whose limits are set and whose tokens are counted.

    Where it fails halfway, the plans of the caches have grown: that cannot be undone.

    Args:
        seen: attention of each layer.
        caches: of all sequences of the step.
        evictions: by sequence.
    """
    assert tables.evictions is not None
    count_plans(caches, evictions)
    tables.evictions.evict(seen)
    count_evictions(caches, evictions)


def count_plans(caches: Sequence[SequenceCache], evictions: Mapping[int, PageEviction]) -> None:
    """Count evictions of caches as plans, before kernels carry them out."""
    for sequence in evictions:
        caches[sequence].count_eviction()


def count_evictions(caches: Sequence[SequenceCache], evictions: Mapping[int, PageEviction]) -> None:
    """Count entries that kernels evicted from caches, behind a step whose tokens are counted."""
    for sequence, eviction in evictions.items():
        layers = caches[sequence].layers
        for layer, limits in eviction.layers.items():
            cast("PagedLayer", layers[layer]).count_step_eviction(limits.count)
