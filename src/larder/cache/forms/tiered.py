"""Tiered layer: device tier under a budget, and offloaded entries that are recalled by search.

    fast    a ragged part, which a budget governs, and slots for recalled pages
    slow    entries that plans rejected, in host memory, and an index over their keys

The design follows Mao, Wang, Ester, Li, "IceCache: Memory-efficient KV-cache Management for
Long-Sequence LLMs" (2026), arXiv:2604.10539, sections 2 and 3. A decode step attends to the ragged
part and to the pages that the index finds; softmax runs over both together. Several tokens at once,
and all tokens of a text, attend to everything, exactly, the slow tier in chunks; so do scratch
passes, which leave no trace. If the recall part says so, a question attends to the union of the
pages that its tokens find, a block of text to the pages that its mean query finds, or both to the
entries on lines of attention that cover a share of it. Parts are
merged by their log-sum-exp. The index adds offloaded entries at the next search, a large one
one by one, and those that wait are attended to. Where the recall part names a length (`exact`),
steps over fewer offloaded entries attend to all and search nothing. A dense layer
offloads nothing. A fork shares slow tier and index until one of both has to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar
from weakref import ref

import torch
from torch import Tensor

from larder.cache.forms._composite import RecoverableLayer
from larder.cache.forms.base import AttentionCall, AttentionState, CacheLayer
from larder.cache.memory_usage import TensorOwner
from larder.cache.new_tokens import NewTokens
from larder.cache.offload.host_memory import MIB, HostMemoryBudget, HostMemoryUser
from larder.cache.offload.page_fetch import PageFetcher, RecallCalls, SharedIndex
from larder.cache.offload.page_selection import EntryNumberCheck, PageSelection
from larder.cache.offload.slow_tier import (
    INDEX,
    OBSERVED,
    PARKING,
    SLOW,
    OffloadBatch,
    SlowTier,
    rejected_entries,
    saved_offload_spec,
)
from larder.cache.spec import FORMS, CacheSpec, LayerOptions, text_tensor, with_prefix
from larder.cache.validation import check_dropped, check_kept, check_offload_plan, refuse_eviction
from larder.core.codec import TransformSpec
from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.recall import PrefillRecall
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import AppendKind, Mode, Queries
from larder.ops.cpu.decode_attention import StepStorage
from larder.ops.rope import rotate


class TieredLayer(RecoverableLayer, HostMemoryUser):
    """Per-head lengths in device memory, rejected entries offloaded to host memory."""

    supports = frozenset({"ledger", "parking"})
    requires = frozenset({"parking"})
    can_be_shared = False
    has_slow_tier = True
    slow_state = (SLOW, INDEX, OBSERVED, PARKING)
    counts_as_device = False  # queries for the index are on the host
    # Whether a step that searches nothing attends to entries where they are, and to nothing else.
    reads_in_place: ClassVar[bool] = True

    def __init__(self, layer: LayerSpec, options: LayerOptions) -> None:
        super().__init__(layer, options)
        parking, device = options.spec.parking, options.device
        assert parking is not None  # required
        self.parking = parking
        self._slow = self._attach(_create_slow_tier(layer, options, options.spec.ledger.columns))
        self.fetcher = self._attach(PageFetcher(layer, parking.recall, options.dtype, device))
        self.leader: TieredLayer | None = None  # the layer whose pages it uses
        self._measured_with: tuple[ref[TieredLayer], ...] = ()  # layers of the first one to search
        self._numbering = EntryNumberCheck(layer.kv_heads)
        self._append_kind = AppendKind.STEP
        self._observed = torch.empty(layer.query_heads, 0, layer.head_dim)
        self._count_bytes()

    @classmethod
    def create(cls, layer: LayerSpec, model: ModelSpec, spec: CacheSpec) -> TieredLayer:
        assert spec.parking is not None  # required
        parking = spec.parking.of_model(model.fingerprint)
        kind = FORMS.load("corrected") if parking.recall.corrected else cls
        kind = FORMS.load("gapless") if parking.is_gapless else kind
        own = replace(spec, parking=parking)
        return kind(layer, LayerOptions(model.dtype, model.device, own))

    @classmethod
    def check_spec(cls, spec: CacheSpec, model: ModelSpec) -> None:
        super().check_spec(spec, model)
        windows = [layer.index for layer in model.layers if layer.sliding_window is not None]
        if windows and spec.parking is not None and spec.parking.recall.corrected:
            raise CacheError(
                f"Layer {windows[0]} has a sliding window and stores no outputs to correct: use "
                "corrected=0, or a model without such layers."
            )
        parking = spec.parking
        if parking is not None and parking.is_gapless and parking.recall.coverage < 1:
            raise CacheError(
                "Texts are read along lines of true distances, which positions without gaps do not "
                "have: use coverage=1, or leave compact() out."
            )

    @classmethod
    def num_dense_layers(cls, spec: CacheSpec) -> int:
        return 0 if spec.parking is None else spec.parking.recall.dense

    @classmethod
    def link_layers(cls, layers: Sequence[CacheLayer], spec: CacheSpec) -> None:
        """Link the layers with the host memory budget and their recall leaders."""
        mib = None if spec.parking is None else spec.parking.host_mib
        budget, tiers = (
            HostMemoryBudget(None if mib is None else mib * MIB),
            [layer for layer in layers if isinstance(layer, TieredLayer)],
        )
        for tier in tiers:
            tier.join(budget)
        searched = [tier for tier in tiers if not tier.is_dense]
        for index, tier in enumerate(searched):
            leader = searched[tier.parking.recall.leader_of(index)]
            is_other = leader is not tier and tier.has_same_heads(leader)
            tier.leader = leader if is_other else None
        if searched and searched[0].parking.recall.measures_layers:
            searched[0]._measured_with = tuple(map(ref, searched))

    def has_same_heads(self, other: TieredLayer) -> bool:
        """True if two layers have the same numbers of kv heads and query heads."""
        own, others = self.layer, other.layer
        return (own.kv_heads, own.query_heads) == (others.kv_heads, others.query_heads)

    @property
    def parts(self) -> tuple[TensorOwner, ...]:
        return self._ragged, self._slow, self.fetcher

    def own_tensors(self) -> tuple[Tensor, ...]:
        return (self._observed,)

    def observe(self, new: NewTokens, state: AttentionState) -> None:
        wanted, queries = self.parking.recall.observed, new.queries
        if wanted and not self.is_dense:
            if self.parking.recall.observes_unrotated and self.layer.radians:
                radians = torch.tensor(self.layer.radians, device=queries.device)
                queries = rotate(queries, -new.positions, radians)
            latest = torch.cat([self._observed, queries.detach().float().cpu()], 1)
            self._observed = latest[:, -wanted:].contiguous()
            self._count_bytes()

    def expect(self, kind: AppendKind) -> None:
        """Set the kind of the tokens of the next passes."""
        self._append_kind = kind

    def compact(self) -> None:
        super().compact()
        self._slow.compact()

    def truncate(self, length: int) -> None:
        """Drop entries at `length` and later; a changed slow tier is indexed again."""
        rest = self._slow.without_range(length)
        self._ragged.truncate(length)
        self._replace_slow_tier(rest)

    def drop_range(self, start: int, stop: int) -> None:
        """Drop entries at true positions [start, stop) in both tiers."""
        rest = self._slow.without_range(start, stop)
        self._ragged.drop_range(start, stop)
        self.replaced_bytes = self._ragged.replaced_bytes
        self._replace_slow_tier(rest)

    def _replace_slow_tier(self, slow_tier: SlowTier | None) -> None:
        """Replace the slow tier, if `slow_tier` is not None, and its index."""
        if slow_tier is not None:
            self._slow = self._attach(slow_tier, self._slow)
            self._numbering = EntryNumberCheck(self.layer.kv_heads)
            fresh = PageFetcher(self.layer, self.parking.recall, *self.fetcher.like)
            self.fetcher = self._attach(fresh, self.fetcher)

    def parked(self) -> Entries:
        """Offloaded entries, in order of their numbers."""
        return self._slow.entries()

    def state(self) -> dict[str, Tensor]:
        self._update_index()
        state = self._ragged.state() | {PARKING: text_tensor(self.parking.to_text())}
        state |= {SLOW + name: tensor for name, tensor in self._slow.state().items()}
        if self.fetcher.shared_index.is_used:
            own = self.fetcher.shared_index.index.state()
            state |= {INDEX + name: tensor for name, tensor in own.items()}
        return state | {OBSERVED: self._observed.clone()}

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> TieredLayer:
        parking = saved_offload_spec(state, layer)
        spec = CacheSpec("tiered", parking=parking)
        store = cls(layer, LayerOptions.of_state(state, spec))
        store._adopt_ragged(state)
        slow = _create_slow_tier(layer, store.options, store._ragged.ledger.columns)
        slow.adopt(with_prefix(SLOW, state))
        store._slow = store._attach(slow, store._slow)
        if own := with_prefix(INDEX, state):
            index = parking.recall.adopt(layer, own)
            store.fetcher.use_index(SharedIndex(parking.recall, layer, index, slow.lengths))
        store._observed = state[OBSERVED]
        store._count_bytes()
        return store

    def _like(self) -> TieredLayer:
        self._update_index()
        copy = type(self)(self.layer, self.options)
        copy._slow = copy._attach(self._slow.fork(), copy._slow)
        copy.fetcher.use_index(self.fetcher.shared_index.fork())
        copy.fetcher.fetches_ahead = self.fetcher.fetches_ahead
        copy._observed = self._observed
        copy._count_bytes()
        return copy

    def _copy_tensors(self) -> None:
        self._observed = self._observed.clone()
        self._count_bytes()

    def join(self, room: HostMemoryBudget) -> None:
        """Share the host memory budget of the sequence."""
        self._slow.room = room
        room.join(self)

    @property
    def host_nbytes(self) -> int:
        return self._slow.nbytes + self.fetcher.shared_index.nbytes

    @property
    def foreseen_bytes(self) -> int:
        """Device bytes that the page slots of the first decode step will need."""
        if not self.has_offloaded or self.fetcher.slot_bytes:
            return 0
        return self.fetcher.foreseen_bytes(self._slow.lengths)

    @property
    def shared_nbytes(self) -> int:
        """Bytes shared with forks of this layer or with the one it was forked from."""
        return super().shared_nbytes + self._shared_slow_nbytes

    @property
    def shared_host_nbytes(self) -> int:
        """Bytes of `shared_nbytes` that are not in the model's memory."""
        return self._family.shared_bytes(self) + self._shared_slow_nbytes

    @property
    def _shared_slow_nbytes(self) -> int:
        return self._slow.shared_nbytes + self.fetcher.shared_index.shared_nbytes

    @property
    def pages(self) -> tuple[int, int]:
        return self.fetcher.pages

    @property
    def has_offloaded(self) -> bool:
        """True if the slow tier holds any entry."""
        return bool(len(self._slow))

    @property
    def _is_empty(self) -> bool:
        return not any(self.lengths) and not len(self._slow)

    @property
    def is_dense(self) -> bool:
        """True for the first layers, which offload nothing."""
        return self.layer.index < self.parking.recall.dense

    def block_call(self, new: NewTokens) -> AttentionCall | None:
        coverage = self.parking.recall.coverage
        is_sparse = coverage < 1 and new.mode is Mode.APPEND and not self.is_dense
        if not is_sparse or not self.attends_blocks(new):
            return None
        from larder.ops.line_attention import line_attention

        heads, own = self._entries_with(new), new.positions.to(new.queries.device).long()
        return partial(line_attention, new.queries, heads, own, self.layer.scaling, coverage)

    def _entries_with(self, new: NewTokens) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Keys, values and positions of both tiers and new tokens, by kv head in text order."""
        tiers = self._slow.entries(), self._ragged.entries()
        found = list[tuple[Tensor, Tensor, Tensor]]()
        for head, sides in enumerate(zip(new.keys, new.values, strict=True)):
            held = [
                [each.head_keys(head) for each in tiers],
                [each.head_values(head) for each in tiers],
                [each.head_positions(head) for each in tiers],
            ]
            parts = zip(held, (*sides, new.positions), strict=True)
            columns = [
                torch.cat([*(column.to(last) for column in old), last]) for old, last in parts
            ]
            order = columns[2].argsort()
            found.append((columns[0][order], columns[1][order], columns[2][order].long()))
        return found

    def attention_calls(self, new: NewTokens) -> Iterator[AttentionCall]:
        if self._recalls_in_one_call(new):
            self._measure_layers()
            held, resident = self._slow.entries(), self._ragged.attended_rows(new)
            states = self.fetcher.step_states(new.queries, held, self._observed, [resident])
            yield from (partial(lambda state: state, state) for state in states)
            return
        yield from self._ragged.attention_calls(new)
        if len(self._slow):
            yield from self._offloaded_calls(new.queries, new.mode)

    def _offloaded_calls(self, queries: Queries, mode: Mode) -> Iterable[AttentionCall]:
        """Kernel calls for the recalled part of the slow tier, or for all of it."""
        is_step = mode is Mode.APPEND and self._append_kind is AppendKind.STEP
        if is_step and queries.shape[1] == 1 and self._reads_all:
            return self._slow.attention_calls(queries)
        held, search = self._slow.entries(), self._search(queries, mode)
        if search is None:
            return self._slow.attention_calls(queries)
        if (selection := self._leader_selection(held)) is not None:
            return self.fetcher.selection_calls(queries, held, selection)
        calls = search(queries, held, self._observed)
        return self._slow.attention_calls(queries) if calls is None else calls

    def step_storage(self) -> StepStorage | None:
        if not self._steps_over_all:
            return None
        own = self._ragged.step_storage()
        self.replaced_bytes = self._ragged.replaced_bytes
        if own is None or not len(self._slow):
            return own
        return own._replace(segments=(self._slow.step_segment(), *own.segments))

    def count_step(self, position: int) -> None:
        self._ragged.count_step(position)

    @property
    def _steps_over_all(self) -> bool:
        """True if a step attends to all entries of both tiers, in place, and leaves no record."""
        if not self.reads_in_place or self._append_kind is not AppendKind.STEP:
            return False
        if not len(self._slow):
            return not self.parking.recall.observed
        is_near = self._ragged.like.device.type == "cpu" and not self._ragged.records_logits
        return is_near and self._reads_all and not self.parking.recall.observed

    @property
    def _reads_all(self) -> bool:
        """True while a decode step attends to all offloaded entries instead of searching."""
        most = self.parking.recall.exact or 0
        return self.parking.codec is None and max(self._slow.lengths, default=0) <= most

    def _recalls_in_one_call(self, new: NewTokens) -> bool:
        """True if a kernel searches, loads pages and attends to both tiers in one call."""
        is_step = new.is_step and self._append_kind is AppendKind.STEP
        if not is_step or not len(self._slow) or self._reads_all or self.leader is not None:
            return False
        return self.fetcher.takes_one_call(new.queries, self._slow.entries())

    def _search(self, queries: Queries, mode: Mode) -> RecallCalls | None:
        """Search for a decode step, question or block; None for attention to all entries."""
        recall, fetcher = self.parking.recall, self.fetcher
        if mode is not Mode.APPEND:
            return None
        if queries.shape[1] == 1 and self._append_kind is AppendKind.STEP:
            self._measure_layers()
            if recall.follows:
                held, stays = self._slow.entries(), self._ragged.entries()
                fetcher.observe_step(queries, held, self._observed, stays)
            return fetcher.step_calls
        if self._append_kind is AppendKind.QUESTION and recall.union is not None:
            return fetcher.union_calls
        return fetcher.block_calls if recall.prefill is PrefillRecall.RECALLED else None

    def _leader_selection(self, entries: Entries) -> PageSelection | None:
        """Page selection of the leader in this step; None if its slow tier differs."""
        selection = None if self.leader is None else self.leader.fetcher.selection
        if self.leader is None or selection is None or selection.lengths != entries.lengths:
            return None
        return selection if self._numbering.agrees(entries, self.leader.parked()) else None

    def _measure_layers(self) -> None:
        """Update all indexes and let the recall part measure over them, before the first search."""
        layers = [layer for each in self._measured_with if (layer := each()) is not None]
        if layers:
            for layer in layers:
                layer._update_index()
            self.fetcher.measure([layer.fetcher for layer in layers])

    def _update_index(self) -> None:
        """Update the index, unless only the leader's index is searched, or none."""
        if self._searches and not self._reads_all:
            self.fetcher.update_index(self._slow.entries(), self._observed)

    @property
    def _searches(self) -> bool:
        """True if this layer's own index is or was searched."""
        return self.leader is None or self.fetcher.shared_index.is_used

    def fetch(self, queries: Queries) -> None:
        """Find and transfer pages for queries [H, 1, D] ahead of attention, on any thread."""
        self.fetcher.fetch(queries, self._slow.entries(), self._observed)

    def _carry_out(self, plan: Plan, change: Callable[[Plan], None]) -> None:
        """Offload the entries that a plan rejects and does not drop, then apply it."""
        check_offload_plan(plan)
        check_kept(plan, self.lengths)
        self._ragged.check_numbers(plan)
        held = self._ragged.entries()
        rejected = rejected_entries(plan, sum(held.lengths))
        check_dropped(plan, rejected)
        if not len(rejected):
            change(plan)
            self.replaced_bytes = self._ragged.replaced_bytes
            return
        if self.is_dense:
            refuse_eviction(len(rejected), self.layer)
        parked = (
            rejected[~torch.isin(rejected, plan.dropped.cpu())] if len(plan.dropped) else rejected
        )
        batch = OffloadBatch.of(held, parked)
        self._slow.add(batch, self._index_bytes(len(parked)))
        try:
            change(plan)
        except BaseException:
            self._slow.undo_add(batch.lengths)
            raise
        self.replaced_bytes = self._ragged.replaced_bytes + self._slow.replaced_bytes

    def _index_bytes(self, count: int) -> int:
        """Estimated growth of the index for `count` more entries; 0 without a limit."""
        counts = self._slow.room.limit is not None and self._searches
        return (
            self.fetcher.shared_index.growth_estimate_bytes(len(self._slow) + count)
            if counts
            else 0
        )


def _create_slow_tier(
    layer: LayerSpec, options: LayerOptions, columns: tuple[str, ...]
) -> SlowTier:
    """Empty slow tier, coded if the offload spec has a codec."""
    codec = None if options.spec.parking is None else options.spec.parking.codec
    is_pinned = options.device.type == "cuda"
    if codec is None:
        return SlowTier(layer, options.dtype, columns, is_pinned)
    if isinstance(codec, TransformSpec):
        from larder.cache.offload.transformed_slow_tier import TransformedSlowTier
        from larder.cache.transform_tables import TransformTables

        tables = TransformTables.load(layer, codec)
        return TransformedSlowTier(layer, options.dtype, columns, is_pinned, codec, tables)
    from larder.cache.offload.quantized_slow_tier import QuantizedSlowTier

    return QuantizedSlowTier(layer, options.dtype, columns, is_pinned, codec)


Part = TieredLayer
