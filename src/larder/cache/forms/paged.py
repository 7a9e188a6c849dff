"""Paged layer: entries in pages of an arena that all sequences of a model share.

For accelerators: attention of all sequences is one call per layer over page tables. Made in place
of dense and ragged layers of a model whose spec has an arena (`Decoder.use_pages`); heads may have
lengths of their own. Ledger columns are in the same pages. A fork shares pages, copied on write: at
its first token, or when a column is written, which is one number of every entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.entry_columns import EntryColumns, check_columns, check_scalars
from larder.cache.forms.base import AttentionCall, AttentionState, CacheLayer
from larder.cache.forms.dense import DenseLayer
from larder.cache.forms.ragged import RaggedLayer
from larder.cache.layer_pages import LayerPages
from larder.cache.merged_entries import merge_entries
from larder.cache.new_tokens import NewTokens
from larder.cache.page_arena import PageArena
from larder.cache.page_lease import NUMBER_BYTES, IntArray, PageLease
from larder.cache.spec import CacheSpec
from larder.cache.validation import check_counts, check_dtypes, check_kept, check_single_precision
from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.part import Ledger
from larder.core.plan import Plan, StepQuota
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import Keys, Positions, Queries, Values
from larder.ops.packing import copy_to_device, search_sorted
from larder.ops.paged_attention import paged_attention
from larder.ops.pages import append_rows

LENGTH_BYTES = 8  # of the length of a head in a state


@runtime_checkable
class StepBudget(Protocol):
    """Budget of a policy, as far as a layer asks it."""

    def step_quota(
        self, scalars: Mapping[str, Float[Tensor, " K"]], quota: int, tokens: int
    ) -> StepQuota | None:
        """Entries that stay behind a decode step, by the ledger scalars of a layer."""
        ...


class PagedLayer(CacheLayer):
    """Entries of one layer of one sequence in pages of an arena.

    States are those of `plain`, the form that the layer stands for, so that a saved cache restores
    with and without an arena. Bytes are those of whole pages, shared ones included.
    """

    supports = frozenset({"ledger"})
    has_public_name = False

    def __init__(self, pool: LayerPages, plain: type[CacheLayer], ledger: Ledger) -> None:
        super().__init__(pool.layer)
        self._lease, self._plain = PageLease(pool, ledger), plain
        self._counted_pages = 0
        self._quotas: dict[object, StepQuota | None] = {}

    @classmethod
    def create(cls, layer: LayerSpec, model: ModelSpec, spec: CacheSpec) -> PagedLayer:
        arena = model.arena
        if not isinstance(arena, PageArena):
            raise CacheError(
                "The model's spec has no arena of pages: call Decoder.use_pages() before a cache "
                "is made, or use a dense or ragged cache."
            )
        arena.hold_ledger(spec.ledger)
        plain = RaggedLayer if spec.form == "ragged" else DenseLayer
        return cls(arena.pages[layer.index], plain, spec.ledger)

    @property
    def page_lease(self) -> PageLease:
        return self._lease

    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        heads, count = keys.shape[:2]
        self._fill(
            np.full(heads, count, np.int64),
            keys.flatten(0, 1),
            values.flatten(0, 1),
            positions.to(torch.int32).repeat(heads),
        )

    def count_step(self, position: int) -> None:
        self._lease.count_step()
        if self._lease.num_pages == self._counted_pages:
            self.usage.add_entries(self.layer.kv_heads)
        else:  # the step has started new pages
            self._count()

    def count_step_eviction(self, count: int) -> None:
        """Count what kernels evicted behind a step, from heads with more than `count` entries."""
        self._lease.count_step_eviction(count)
        self.usage.set_entries(int(self._lease.lengths.sum()))

    def step_quota(self, budget: StepBudget, quota: int, tokens: int) -> StepQuota | None:
        """`Budget.step_quota` of the layer, found again only after a scalar was written.

        The thresholds that kernels over pages move do not count.
        """
        key = budget, quota, tokens
        if key not in self._quotas:
            self._quotas[key] = budget.step_quota(self.ledger_scalars(), quota, tokens)
        return self._quotas[key]

    def attention_calls(self, new: NewTokens) -> list[AttentionCall]:
        return [partial(self._attend_held, new.queries)]

    def apply(self, plan: Plan) -> None:
        check_kept(plan, self.lengths)
        self.evict(plan)

    def evict(self, plan: Plan) -> None:
        check_single_precision(plan)
        check_counts(plan, self.layer.kv_heads)
        check_columns(plan.columns, self.ledger, len(plan.kept))
        check_scalars(plan.scalars, self.ledger, self.layer.kv_heads)
        merged = merge_entries(plan, self.entries()) if len(plan.folds) else None
        self._lease.compact(plan.kept, plan.lengths)
        if merged is not None:
            pool, device = self._lease.pool, self._lease.pool.keys.device
            rows = copy_to_device(self._lease.packed_rows(), device)
            rows = rows[search_sorted(merged.targets.to(device), plan.kept.to(device))]
            pool.write(rows, merged.keys.to(pool.keys.dtype), merged.values.to(pool.keys.dtype))
        self._lease.write_columns(plan.columns)
        self._write_scalars(plan.scalars)
        self._count()

    def write_columns(self, columns: Mapping[str, Float[Tensor, " T"]]) -> None:
        """Replace ledger columns, given one number per packed entry.

        Raises:
            CacheError: the layer has no such column, or pages that forks share cannot be copied;
                nothing is written.
        """
        check_columns(columns, self.ledger, sum(self.lengths))
        self._lease.write_columns(columns)
        self._count()

    @property
    def ledger(self) -> Ledger:
        """Ledger, in the order of the columns."""
        return self._lease.ledger

    def ledger_scalars(self) -> Mapping[str, Float[Tensor, " K"]]:
        """Copies of the ledger scalars by name."""
        return self._lease.gather_scalars()

    def _write_scalars(self, scalars: Mapping[str, Float[Tensor, " K"]]) -> None:
        self._lease.write_scalars(scalars)
        self._quotas.clear()

    def allocate(self, room: int) -> None:
        self._lease.reserve(room)
        self._count()

    def compact(self) -> None:
        self._lease.set_lengths(self.lengths)
        self._count()

    def truncate(self, length: int) -> None:
        heads = self._lease.gather()[2].split(list(self.lengths))
        self._lease.set_lengths([int((head < length).sum()) for head in heads])
        self._count()

    def entries(self) -> Entries:
        """Copies of all entries, end to end."""
        lengths = self._lease.lengths
        starts = tuple((lengths.cumsum() - lengths).tolist())
        columns = dict(zip(self.ledger.columns, self._lease.gather_columns(), strict=True))
        numbers = columns, self._lease.gather_scalars()
        return Entries(*self._lease.gather(), starts, self.lengths, *numbers)

    @property
    def entries_copy_bytes(self) -> int:
        return sum(self.lengths) * self._lease.page_bytes // self._lease.pool.page_tokens

    @property
    def idle_nbytes(self) -> int:
        per_head = LENGTH_BYTES + NUMBER_BYTES * len(self.ledger.scalars)
        return self.entries_copy_bytes + per_head * self.layer.kv_heads

    @property
    def shared_nbytes(self) -> int:
        return self._lease.shared_pages * self._lease.page_bytes

    def fork(self) -> PagedLayer:
        copy = PagedLayer(self._lease.pool, self._plain, self.ledger)
        copy._lease = self._lease.fork()
        copy._count()
        return copy

    def separate(self) -> None:
        """No effect: a page is free once the last of its holders lets go, so each may go alone."""

    def state(self) -> dict[str, Tensor]:
        keys, values, positions = self._lease.gather()
        if self._plain is DenseLayer:
            heads = self.layer.kv_heads
            sides = {"keys": keys.unflatten(0, (heads, -1)), "values": values}
            sides["values"] = values.unflatten(0, (heads, -1))
            return {**sides, "positions": positions[: self.lengths[0]].clone()}
        lengths = torch.from_numpy(self._lease.lengths.copy())
        exact = {"keys": keys, "values": values, "positions": positions, "lengths": lengths}
        numbers = EntryColumns(self.ledger, self.layer.kv_heads, positions.device)
        numbers.values = self._lease.gather_columns()
        numbers.write_scalars(self._lease.gather_scalars())
        return exact | numbers.state(torch.arange(len(positions), device=positions.device))

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> PagedLayer:
        raise CacheError(
            f"A paged layer {layer.index} is restored into an arena: use SequenceCache.restore()."
        )

    def adopted(self, state: dict[str, Tensor]) -> PagedLayer:
        layer, keys = PagedLayer(self._lease.pool, self._plain, self.ledger), state["keys"]
        if keys.dim() == 3:
            heads, length = keys.shape[:2]
            counts = np.full(heads, length, np.int64)
            sides = keys.flatten(0, 1), state["values"].flatten(0, 1)
            positions = state["positions"].repeat(heads)
        else:
            counts, sides = state["lengths"].cpu().numpy(), (keys, state["values"])
            positions = state["positions"]
        layer._fill(counts, *sides, positions)
        held = EntryColumns.adopt(state, self.layer.kv_heads, len(positions))
        layer._lease.write_columns(held.by_name())
        layer._write_scalars(held.scalars_by_name)
        layer._count()
        return layer

    def restored(self, state: dict[str, Tensor]) -> PagedLayer:
        return self.adopted(state)

    def own_tensors(self) -> tuple[Tensor, ...]:
        """Tensors of the layer: none, as all are in the arena."""
        return ()

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lease.lengths.tolist())

    def _fill(self, counts: IntArray, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Append entries to each head, given head by head."""
        pool = self._lease.pool
        check_dtypes(self.layer, pool.keys.dtype, keys, values)
        self._lease.reserve(counts)
        slots = copy_to_device(self._lease.slots(counts), pool.keys.device)
        pool.append(slots, keys, values)
        append_rows(pool.positions, slots, positions)
        self._lease.count(counts)
        self._count()

    def _attend_held(self, queries: Queries) -> AttentionState:
        """Attention of queries to all entries."""
        pool, heads = self._lease.pool, self.layer.kv_heads
        tables = self._lease.tables(queries.shape[1])
        stored = pool.keys, pool.values, tables, self.layer.scaling, pool.backend
        own = queries.unflatten(0, (heads, -1))
        biases = pool.biases if self._lease.has_biases else None
        out, lse = paged_attention(own, *stored, biases, self.layer.softcap)
        if not self._lease.lengths.all():
            is_empty = (tables.lengths == 0)[:, None, None]
            out = out.masked_fill(is_empty.unsqueeze(-1), 0.0)
            lse = lse.masked_fill(is_empty, -torch.inf)
        return out.flatten(0, 1), lse.flatten(0, 1)

    def _count(self) -> None:
        """Count bytes and entries after a change."""
        pages = self._counted_pages = self._lease.num_pages
        self.usage.set_bytes(pages * self._lease.page_bytes, self.counts_as_device)
        self.usage.set_entries(int(self._lease.lengths.sum()))


Part = PagedLayer
