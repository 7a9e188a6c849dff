"""Ragged layer: per-head entry counts in flat storage without padding.

    keys   [ head 0 entries | slack | head 1 entries | slack | ... ]      one row an entry
             ^edges[0]                ^edges[1]

Latents (MLA) are keys and values at once: both names refer to one storage.

`apply` frees rejected entries at once: the kept ones are relocated into new storage. `evict`, for
decode steps, turns them into slack for the next tokens, and a head may then begin after its edge.
Attention reads the entries, never the slack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.cache.entry_columns import EntryColumns
from larder.cache.forms._ragged_steps import GROWTH_TOKENS, RaggedSteps
from larder.cache.forms.base import AttentionCall, CacheLayer
from larder.cache.merged_entries import MergedEntries, merge_entries, no_merges
from larder.cache.new_tokens import NewTokens
from larder.cache.row_updates import (
    InsertedEntries,
    PlannedEviction,
    PlanWrites,
    append_runs,
    insert_entries,
    plan_writes,
    relocate_rows,
)
from larder.cache.shared_storage import SharedSegment, joined_rows
from larder.cache.spec import FORMS, CacheSpec, LayerOptions
from larder.cache.validation import (
    check_counts,
    check_dtypes,
    check_kept,
    check_merges_whole,
    check_single_precision,
)
from larder.core.observation import Entries
from larder.core.part import Ledger
from larder.core.plan import Plan
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import Keys, Mode, Positions, Values
from larder.ops.attention import ragged_attention
from larder.ops.block_attention import BlockAttention
from larder.ops.cpu.decode_attention import AttendedRows
from larder.ops.packing import packed_rows, starts_of


class RaggedLayer(RaggedSteps):
    """Per-head lengths; rejected entries free memory."""

    supports = frozenset({"ledger", "codecs", "transform"})
    holds_latents = True
    can_page = True

    def __init__(self, layer: LayerSpec, options: LayerOptions) -> None:
        super().__init__(layer, options)
        self._records_sums = False
        self._weight_sums: Tensor | None = None  # an activation: taken before the next layer
        self._count_bytes()

    @classmethod
    def layer_class(cls, spec: CacheSpec) -> type[CacheLayer]:
        if spec.codecs:
            return FORMS.load("graded")
        return cls if spec.transform is None else FORMS.load("transform")

    @classmethod
    def create(cls, layer: LayerSpec, model: ModelSpec, spec: CacheSpec) -> CacheLayer:
        other = cls.layer_class(spec)
        create = super().create if other is cls else other.create
        return create(layer, model, spec)

    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        check_dtypes(self.layer, self._keys.dtype, keys, values)
        count, self.replaced_bytes = keys.shape[1], 0
        self.hold_logits(None)
        if count == 1:  # attention to several storages would copy them at each step
            self._unshare(GROWTH_TOKENS)
        self._make_room(count)
        rows = self._starts + self._lengths
        if count == 1:
            self._append_entry(rows.to(self._keys.device), keys, values, positions)
        else:
            firsts, spread = rows.tolist(), positions.expand(len(rows), -1)
            fresh = [keys, spread] if self.layer.latent_rank else [keys, values, spread]
            for run in append_runs(self._stored(), firsts, fresh):
                self._columns.clear(run)
        self._set_lengths(self._lengths + count)
        self._room -= count

    def _append_entry(
        self, rows: Int64[Tensor, " K"], keys: Keys, values: Values, positions: Positions
    ) -> None:
        """Append one entry to each head, at its row."""
        self._keys.index_copy_(0, rows, keys[:, 0])
        if not self.layer.latent_rank:
            self._values.index_copy_(0, rows, values[:, 0])
        self._positions.index_copy_(0, rows, positions.to(torch.int32).expand(len(rows)))
        self._columns.clear(rows)

    def ledger_scalars(self) -> Mapping[str, Float[Tensor, " K"]]:
        return self._columns.scalars_by_name

    def apply(self, plan: Plan) -> None:
        check_single_precision(plan)
        check_kept(plan, self.lengths)
        self.apply_folded(plan, self._merge(plan))

    def apply_folded(
        self, plan: Plan, sums: MergedEntries, inserted: InsertedEntries | None = None
    ) -> None:
        """Apply a validated plan, with merged and inserted entries computed by the caller."""
        self._unshare_segments()
        rows = packed_rows(self._starts, self._lengths)[plan.kept.cpu()]
        lengths = torch.tensor(plan.lengths, dtype=torch.int64)
        coming = inserted.counts(len(lengths)) if inserted else 0
        changes = self._changes(plan, sums, (starts_of(lengths + coming), lengths))
        self._lay_out(list(rows.split(plan.lengths)), coming)
        self._write(changes)
        if inserted:
            self._insert(inserted)

    def evict(self, plan: Plan) -> None:
        check_single_precision(plan)
        check_counts(plan, self.layer.kv_heads)
        self.evict_folded(plan, self._merge(plan))

    def evict_folded(
        self, plan: Plan, sums: MergedEntries, inserted: InsertedEntries | None = None
    ) -> None:
        """Evict by a validated plan, with merged and inserted entries computed by the caller."""
        from larder.ops.removal import MIN_ROAMING_SLACK, move_rows, plan_removal

        self.replaced_bytes = 0
        self.hold_logits(None)
        self._unshare()
        if inserted:
            self._make_room(int(inserted.counts(len(plan.lengths)).max()))
        kept, lengths = plan.kept.cpu(), torch.tensor(plan.lengths, dtype=torch.int64)
        starts, held, slack = self._starts, self._lengths, MIN_ROAMING_SLACK
        motion = plan_removal(starts, held, kept, plan.lengths, self._edges, slack)
        writes = len(sums.targets) or plan.columns or plan.scalars
        changes = self._changes(plan, sums, (motion.starts, lengths)) if writes else None
        columns = self._columns.values
        move_rows(self._stored(), starts, held, kept, plan.lengths, columns, motion)
        self._starts, self._room = motion.starts, motion.room
        self._set_lengths(lengths)
        if changes is not None:
            self._write(changes)
        if inserted:
            self._move_to_edges(int(inserted.counts(len(lengths)).max()))
            self._insert(inserted)

    def plan_eviction(self, plan: Plan) -> PlannedEviction | None:
        from larder.ops.cpu.removal import RowRemoval, removes_together, supports

        if plan.added is not None or not removes_together():
            return None
        check_single_precision(plan)
        check_counts(plan, self.layer.kv_heads)
        self.check_numbers(plan)
        sums = self._merge(plan)
        self._unshare()
        storages = (*self._stored(), *self._columns.values)
        if not supports(storages):
            return None
        kept = plan.kept.cpu().contiguous()
        places = self._starts, self._lengths, kept, plan.lengths, self._edges
        return PlannedEviction(plan, sums, RowRemoval(storages, *places))

    def finish_eviction(self, eviction: PlannedEviction, room: int) -> None:
        plan, sums = eviction.plan, eviction.sums
        self.count_eviction(room)
        if len(sums.targets) or plan.columns or plan.scalars:
            self._write(self._changes(plan, sums, (self._starts, self._lengths)))

    def write_columns(self, columns: Mapping[str, Float[Tensor, " C"]]) -> None:
        if self._is_shared:
            self._unshare_with(columns)
        else:
            self._columns.write(columns)

    def write_packed_columns(self, columns: Float[Tensor, "n T"]) -> None:
        """Replace all ledger columns, one number per packed entry."""
        self._unshare()
        rows = packed_rows(self._starts, self._lengths).to(self._keys.device)
        self._columns.values[:, rows] = columns

    def check_numbers(self, plan: Plan) -> None:
        """Check a plan's columns and scalars. Raises: CacheError: they do not fit the ledger."""
        self._columns.check_columns(plan.columns, len(plan.kept))
        self._columns.check_scalars(plan.scalars)

    def _unshare_with(self, columns: Mapping[str, Float[Tensor, " C"]]) -> None:
        """Copy shared entries, and replace columns given by row of the shared storage."""
        held = self._read_storage()
        self._columns.check_columns(columns, held.columns.shape[1])
        rows = packed_rows(held.starts, held.lengths)
        self._unshare()
        rows_now = packed_rows(self._starts, self._lengths)
        self._columns.write_rows(rows_now, {name: columns[name][rows] for name in columns})

    @property
    def ledger(self) -> Ledger:
        """Ledger, in the order of the columns."""
        return self._columns.ledger

    def allocate(self, room: int) -> None:
        self._start_storage(room, room)
        self._move_to_edges(room)
        if room > self._room:
            self._lay_out(self._used_rows(), room)

    def compact(self) -> None:
        self._compact_segments()
        if len(self._keys) > int(self._lengths.sum()) and not self._holders.are_many:
            self._lay_out(self._used_rows(), 0)

    def truncate(self, length: int) -> None:
        self._weight_sums = None  # of a pass that failed before they were written
        lengths = self._lengths_before(self._storage(), length)
        self._room = self._least_room(self._starts, lengths)
        self._set_lengths(lengths)
        if self._segments:
            self._cut_segments(length)
            self._drop_empty_storage()
            self._count_bytes()

    def entries(self) -> Entries:
        if self.ledger.columns or len(self._filled) > 1:
            self._unshare()  # so that numbers that are noted show in the views
        held = self._read_storage()
        columns = dict(zip(self.ledger.columns, held.columns, strict=True))
        return Entries(
            held.keys,
            held.values[:, : self.layer.latent_rank] if self.layer.latent_rank else held.values,
            held.positions,
            tuple(held.starts.tolist()),
            tuple(held.lengths.tolist()),
            columns,
            self._columns.scalars_by_name,
        )

    def state(self) -> dict[str, Tensor]:
        held = self._read_storage()
        rows = packed_rows(held.starts, held.lengths).to(self._keys.device)
        return {
            "keys": held.keys[rows],
            **({} if self.layer.latent_rank else {"values": held.values[rows]}),
            "positions": held.positions[rows],
            "lengths": held.lengths.clone(),
            **self._columns.beside(held.columns).state(rows),
        }

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> RaggedLayer:
        store = cls(layer, LayerOptions.of_state(state))
        store._keys = state["keys"]
        store._values = store._keys if layer.latent_rank else state["values"]
        store._positions = state["positions"]
        store._set_lengths(state["lengths"])
        store._starts = starts_of(store._lengths)
        store._edges = (*store._starts.tolist(), len(store._keys))
        store._columns = EntryColumns.adopt(state, layer.kv_heads, len(store._keys))
        store.options = store.options.with_ledger(store.ledger)
        store._count_bytes()
        return store

    def _stored(self) -> tuple[Tensor, ...]:
        """Tensors with a row per row of the storage; positions come last."""
        if self.layer.latent_rank:
            return (self._keys, self._positions)
        return (self._keys, self._values, self._positions)

    def own_tensors(self) -> tuple[Tensor, ...]:
        own = (*self._stored(), self._lengths, self._starts)
        own += self._columns.tensors() + self._segment_tensors()
        return own if self._logits is None else (*own, self._logits)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._all_lengths(self._lengths)

    def attention_calls(self, new: NewTokens) -> list[AttentionCall]:
        """Call of the kernel; it records the logits of a decode step after `record_logits`."""
        own = self.attended_rows(new)
        call = partial(ragged_attention, new.queries, own.keys, own.values, own.starts, own.lengths)
        return [partial(call, self.layer.scaling, own.bias, own.logits, self.layer.softcap)]

    def attended_rows(self, new: NewTokens) -> AttendedRows:
        """Entries that new tokens attend to, with a buffer for logits that are to be recorded."""
        logits = None
        if new.is_step:
            logits = self._step_logits(len(new.queries) // self.layer.kv_heads)
        held = self._read_storage()
        rows = held.keys, held.values, held.starts, held.lengths
        return AttendedRows(*rows, self._bias_of(held.columns), logits)

    def block_call(self, new: NewTokens) -> AttentionCall | None:
        records, self._records_sums = self._records_sums and new.mode is Mode.APPEND, False
        self._weight_sums = None
        if not self.attends_blocks(new):
            return None
        held = self._read_storage()
        bias = self._bias_of(held.columns)
        if records and not self.layer.sinks:
            entries = int(held.lengths.sum()) + self.layer.kv_heads * len(new)
            self._weight_sums = torch.empty(entries, device=new.keys.device)
        rows = held.keys, held.values, held.starts, held.lengths
        rest = self.layer.scaling, bias, self._weight_sums
        return BlockAttention(new.queries, *rows, new.keys, new.values, *rest)

    def record_weight_sums(self) -> None:
        self._records_sums = True

    def take_weight_sums(self) -> Float[Tensor, " T"] | None:
        sums, self._weight_sums = self._weight_sums, None
        return sums

    def _merge(self, plan: Plan) -> MergedEntries:
        """Merged entries of a plan."""
        if not len(plan.folds):
            return no_merges(self._keys)
        if self.layer.latent_rank:
            check_merges_whole(plan, self.layer)
        return merge_entries(plan, self.entries())

    def _changes(
        self, plan: Plan, sums: MergedEntries, layout: tuple[Tensor, Tensor]
    ) -> PlanWrites:
        self.check_numbers(plan)
        return plan_writes(plan, sums, layout, self._keys, self._columns.values)

    def _write(self, changes: PlanWrites) -> None:
        if len(changes.targets):
            self._keys.index_copy_(0, changes.targets, changes.keys)
            if not self.layer.latent_rank:
                self._values.index_copy_(0, changes.targets, changes.values)
        self._columns.write_rows(changes.rows, changes.columns)
        self._columns.write_scalars(changes.scalars)

    def _insert(self, inserted: InsertedEntries) -> None:
        """Insert entries at their positions, into existing slack."""
        insert_entries(self._stored(), self._columns.values, self._starts, self._lengths, inserted)
        self._set_lengths(self._lengths + inserted.counts(len(self._lengths)))
        self._room = self._least_room(self._starts, self._lengths)

    def _make_room(self, count: int) -> None:
        """Ensure slack for `count` entries in every head; new storage has some to spare."""
        self._start_storage(count, max(count, GROWTH_TOKENS))
        self._move_to_edges(count)
        if count > self._room:
            self._lay_out(self._used_rows(), max(count, GROWTH_TOKENS))

    def _used_rows(self) -> list[Tensor]:
        """Used storage rows per head."""
        starts, ends = self._starts.tolist(), (self._starts + self._lengths).tolist()
        return [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]

    def _least_room(self, starts: Tensor, lengths: Tensor) -> int:
        """Smallest slack behind any head."""
        ends = zip(self._edges[1:], starts.tolist(), lengths.tolist(), strict=True)
        return min(edge - start - length for edge, start, length in ends)

    def _move_to_edges(self, room: int) -> None:
        """Move heads back to their edges if that gives `room` slack behind each."""
        if self._room >= room or self._holders.are_many:
            return
        starts = torch.tensor(self._edges[:-1])
        won = self._least_room(starts, self._lengths)
        if won < room:
            return
        from larder.ops.removal import remove_rows

        former, held, columns = self._starts, self._lengths, self._columns.values
        kept = torch.arange(sum(self.lengths))
        remove_rows(self._stored(), former, held, kept, self.lengths, columns, starts)
        self._starts, self._room = starts, won

    def _lay_out(self, rows: list[Tensor], room: int | Int64[Tensor, " K"]) -> None:
        """Move the given rows of each head into new storage with `room` slack a head."""
        lengths = torch.tensor([len(part) for part in rows], dtype=torch.int64)
        slack = torch.zeros_like(lengths) + room
        starts, total = starts_of(lengths + slack), int((lengths + slack).sum())
        least = int(slack.min())
        fresh = relocate_rows(self._stored(), self._columns.values, rows, starts, total)
        self.hold_logits(None)
        self.replaced_bytes = self.nbytes
        self._renew_holders()
        # Of latents, the fresh tensors are keys, positions and columns.
        self._keys, self._values, self._positions, self._columns.values = fresh[0], *fresh[-3:]
        self._starts, self._room = starts, least
        self._edges = (*starts.tolist(), total)
        self._set_lengths(lengths)
        self._count_bytes()

    def _set_lengths(self, lengths: Int64[Tensor, " K"]) -> None:
        self._lengths = lengths
        self.usage.set_entries(sum(lengths.tolist()) + self._segment_entries)

    def _storage(self) -> SharedSegment:
        stored = self._keys, self._values, self._positions, self._columns.values
        return SharedSegment(*stored, self._starts, self._edges, self._lengths, self._holders)

    def _use(self, storage: SharedSegment) -> None:
        self._keys, self._values, self._positions = storage.keys, storage.values, storage.positions
        self._columns = self._columns.beside(storage.columns)
        self.hold_logits(None)
        self._starts, self._edges = storage.starts.clone(), storage.edges
        self._room = storage.room
        self._set_lengths(storage.lengths.clone())

    def _joined(self, segments: Sequence[SharedSegment], room: int) -> SharedSegment:
        return joined_rows(segments, room)

    def _like(self) -> RaggedLayer:
        copy = RaggedLayer(self.layer, self.options)
        copy._columns = self._columns.beside(copy._columns.values)
        return copy


Part = RaggedLayer
