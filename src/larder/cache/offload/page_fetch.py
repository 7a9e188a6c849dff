"""Page fetch of one tiered layer: index search, page selection and transfer into device slots.

A page may be prefetched by another thread before the layer attends. Only that thread searches
then; the layer waits for it first. If it fails, the layer searches as without prefetch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakSet

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from larder.cache.forms.base import AttentionCall, AttentionState
from larder.cache.memory_usage import TensorOwner
from larder.cache.offload.page_pool import PagePool, RoomNeeded, attend_estimate, attend_with_mean
from larder.cache.offload.page_selection import PageSelection
from larder.core.observation import Entries
from larder.core.recall import (
    SAMPLE_ENTRIES,
    FetchMode,
    RecallIndex,
    RecallPart,
    RecallResult,
    SearchMode,
)
from larder.core.spec import LayerSpec
from larder.core.types import Queries
from larder.ops.attention import ragged_attention
from larder.ops.cpu.decode_attention import AttendedRows
from larder.ops.packing import packed_rows, starts_of
from larder.ops.search import interleaved

GROWTH = 2  # times the slots, when there are more pages than slots
# An index of so many entries of each head takes new ones one by one, a step each, as long as no
# more are waiting: a step that inserts all that a plan offloads would take twice as long as others.
AMORTIZED_ENTRIES, MAX_WAITING = 1024, 64
ObservedQueries = Float[Tensor, "H O D"]
# Kernel calls for the entries that queries recall; None for attention to all of them.
RecallCalls = Callable[[Queries, Entries, ObservedQueries], list[AttentionCall] | None]


class PageFetcher(TensorOwner):
    """Index over the offloaded entries of a layer, and device slots for the pages that it finds.

    Args:
        dtype, device: of the slots.
    """

    def __init__(
        self, layer: LayerSpec, recall: RecallPart, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.layer, self.recall, self.like = layer, recall, (dtype, device)
        self.shared_index = self._attach(SharedIndex(recall, layer))
        self.fetches_ahead = recall.fetch is not FetchMode.IN_TURN
        self.agreement = 0, 0  # pages found in turn, and how many of them were fetched ahead
        self._selection: PageSelection | None = None
        self._found: tuple[Int64[Tensor, "K P"], tuple[int, ...]] | None = None  # by one call
        self._pool: PagePool | None = None
        self._arrived: Callable[[], bool] | None = None
        self._fetched: RecallResult | None = None

    @property
    def selection(self) -> PageSelection | None:
        """Pages selected for the latest step that was searched for."""
        if self._found is not None:
            pages, lengths = self._found
            index = self.shared_index.index
            members = index.contents(pages)
            self._select_pages(PageSelection(pages, index.versions(pages), members, lengths))
        return self._selection

    def _select_pages(self, selection: PageSelection | None) -> None:
        self._selection, self._found = selection, None

    def selection_calls(
        self, queries: Queries, entries: Entries, selection: PageSelection
    ) -> list[AttentionCall]:
        """Attention to the pages that another layer selected."""
        fill = self._load if queries.shape[1] == 1 else self._load_once
        return [fill(selection, entries).attention_call(queries)]

    def observe_step(
        self, queries: Queries, entries: Entries, observed: ObservedQueries, stays: Entries
    ) -> None:
        """Pass the queries of a decode step to the index before the search.

        Args:
            stays: entries of the fast tier, see `RecallIndex.observe_step`.
        """
        self.update_index(entries, observed)
        before = observed if observed.shape[1] else None
        self.shared_index.observe_step(queries[:, 0].detach().float().cpu(), stays, before)

    def step_calls(
        self, queries: Queries, entries: Entries, observed: ObservedQueries
    ) -> list[AttentionCall] | None:
        """Attention to the pages found for one query per head; None for attention to everything."""
        found, indexed = self._take_prefetched(queries, entries, observed), entries
        if found is None:
            indexed = self._entries_to_index(entries)
            found = self._find_and_load(queries, indexed, observed)
        if found.attends_all:
            return None
        assert self._pool is not None  # made for what was found
        fetched = self._pool.attention_call(queries)
        if indexed.lengths != entries.lengths:
            return [
                fetched,
                partial(attend_unindexed, queries, entries, indexed.lengths, self.layer),
            ]
        if found.share is not None and found.mean is not None:
            fetched = partial(attend_with_mean, fetched, found.share, found.mean, self.layer)
        if found.estimate is None:
            return [fetched]
        return [fetched, partial(attend_estimate, queries, found.estimate, self.layer)]

    def takes_one_call(self, queries: Queries, entries: Entries) -> bool:
        """True if `step_states` serves a decode step over these entries."""
        recall = self.recall
        is_plain = recall.can_read_all and recall.search is SearchMode.INDEX and recall.pages > 0
        if not is_plain or not self.shared_index.index.has_key_trees or self._arrived is not None:
            return False
        layer, (dtype, device) = self.layer, self.like
        if type(entries) is not Entries or entries.keys.dtype != dtype or device.type != "cpu":
            return False
        from larder.ops.cpu.recall_step import can_recall  # not before pages are recalled

        stored = entries.keys, entries.values
        return layer.softcap is None and can_recall(queries, *stored, layer.kv_heads)

    def step_states(
        self,
        queries: Queries,
        entries: Entries,
        observed: ObservedQueries,
        resident: Sequence[AttendedRows],
    ) -> list[AttentionState]:
        """Attention of a decode step to recalled and to resident entries, in one kernel call.

        Equal to `step_calls` in pages, slots and bits, where `takes_one_call`.

        Raises:
            MemoryError: buffers could not be allocated; pages that were requested are loaded.
        """
        indexed = self._entries_to_index(entries)
        self.update_index(indexed, observed)
        trees = self.shared_index.index.key_trees(self.recall.pages)
        others = list(resident)
        if indexed.lengths != entries.lengths:
            others.append(unindexed_rows(entries, indexed.lengths))
        pool = self._pool_of(self.layer.kv_heads, 0)
        while True:
            done = pool.recall(queries, trees, self.recall.pages, indexed, others)
            if not isinstance(done, RoomNeeded):
                break
            pool = self._pool_of(self.layer.kv_heads, done.slots)
            pool.widen_table(done.num_pages)
        if done.requested or not done.outcome:
            self._found = done.pages[:, : done.width], indexed.lengths
        if done.outcome:
            raise MemoryError("A step over recalled entries could not allocate its buffers.")
        recalled, *rest = done.states  # merged in the order of several calls
        return [*rest[: len(resident)], recalled, *rest[len(resident) :]]

    def union_calls(
        self, queries: Queries, entries: Entries, observed: ObservedQueries
    ) -> list[AttentionCall]:
        """Attention of several queries to the union of the pages found for each."""
        rows = [
            self._search(row, entries, observed).pages.clone()
            for row in queries.split(1, dim=1)
        ]  # fmt: skip
        wide, sets = max(pages.shape[1] for pages in rows), len(rows[0])
        lists = torch.stack([pad(pages, (0, wide - pages.shape[1]), value=-1) for pages in rows], 1)
        most = (self.recall.union or 0) // self.recall.page
        selection = self._select(interleaved(lists.flatten(0, 1), sets, most), most, entries)
        self._select_pages(selection)
        return [self._load_once(selection, entries).attention_call(queries)]

    def block_calls(
        self, queries: Queries, entries: Entries, observed: ObservedQueries
    ) -> list[AttentionCall]:
        """Attention of a block of queries to the pages found for their mean."""
        self.update_index(entries, observed)
        mean = queries.detach().float().mean(1).cpu()
        found = self.shared_index.search(mean, entries, SearchMode.EXACT)
        selection = self._select(found.pages, self.recall.pages, entries)
        self._select_pages(selection)
        return [self._load_once(selection, entries).attention_call(queries)]

    def expect(self, arrived: Callable[[], bool] | None) -> None:
        """Use the result of `fetch` in the next decode step.

        Args:
            arrived: waits for the prefetch; returns False if it failed. None cancels the prefetch.
        """
        self._arrived = arrived

    def fetch(self, queries: Queries, entries: Entries, observed: ObservedQueries) -> None:
        """Find and transfer pages for queries [H, 1, D] ahead of attention, on any thread."""
        self._fetched = self._find_and_load(queries, entries, observed)

    def update_index(self, entries: Entries, observed: ObservedQueries) -> None:
        """Add the entries offloaded since the last search to the index."""
        try:
            self.shared_index.update(entries, observed if observed.shape[1] else None)
        except BaseException:  # the index was reset, so its pages are invalid
            self._drop_pool()
            self._select_pages(None)
            raise

    def measure(self, others: Iterable[PageFetcher]) -> None:
        """Let the recall part measure over the indexes of all layers, this one's included; those
        that forks hold too stay as they are.
        """
        shared = [fetcher.shared_index for fetcher in others]
        if self.recall.awaits_measurement([each.index for each in shared]):
            for each in shared:
                each.separate()
            self.recall.measure([each.index for each in shared])

    def use_index(self, index: SharedIndex) -> None:
        """Search another index from now on."""
        self.shared_index = self._attach(index, self.shared_index)

    @property
    def parts(self) -> tuple[TensorOwner, ...]:
        return (self.shared_index,) if self._pool is None else (self.shared_index, self._pool)

    def own_tensors(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots, tables included."""
        return 0 if self._pool is None else self._pool.nbytes

    def foreseen_bytes(self, parked: tuple[int, ...]) -> int:
        """Upper bound of the slot bytes for a search over `parked` entries of each head."""
        there = self.shared_index.index.counts if self.shared_index.indexed == parked else parked
        pages = min(self.recall.pages, max(there)) * self.recall.sets(self.layer)
        rows = pages * self.recall.page
        return PagePool.foreseen_bytes(self.layer, rows, self.like[0].itemsize)

    @property
    def pages(self) -> tuple[int, int]:
        """Pages requested so far, and how many of them had to be moved."""
        return (0, 0) if self._pool is None else (self._pool.requested, self._pool.moved)

    def _take_prefetched(
        self, queries: Queries, entries: Entries, observed: ObservedQueries
    ) -> RecallResult | None:
        """Result of a prefetch; None if there was none or it failed."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            return None
        if not arrived():
            self._drop_pool()  # it may be half filled
            return None
        found = self._fetched
        if found is not None and self.recall.fetch is FetchMode.COMPARED:
            searched = self._search(queries, entries, observed)
            pages, common = _count_common_pages(searched.pages, found.pages)
            self.agreement = self.agreement[0] + pages, self.agreement[1] + common
        return found

    def _find_and_load(
        self, queries: Queries, entries: Entries, observed: ObservedQueries
    ) -> RecallResult:
        """Search result, with its pages loaded into slots."""
        found = self._search(queries, entries, observed)
        if found.attends_all:
            self._select_pages(None)
            return found
        selection = self._select(found.pages, self.recall.pages, entries)
        self._select_pages(selection)
        pool = self._load(selection, entries)
        if found.log_weights is not None:
            pool.add_log_weights(selection.pages, found.log_weights)
        return found

    def _entries_to_index(self, entries: Entries) -> Entries:
        """Entries that the index covers in this step; the others are attended to one by one."""
        known = self.shared_index.indexed
        waiting = [length - old for length, old in zip(entries.lengths, known, strict=True)]
        is_large = min(known) >= AMORTIZED_ENTRIES and max(waiting) <= MAX_WAITING
        if not is_large or type(entries) is not Entries or not self.recall.can_read_all:
            return entries
        lengths = (min(pair) for pair in zip(entries.lengths, (k + 1 for k in known), strict=True))
        return replace(entries, lengths=tuple(lengths))

    def _select(self, pages: Int64[Tensor, "N P"], slots: int, entries: Entries) -> PageSelection:
        """Selection of the found pages, limited to `slots` pages per set of `recall.sets`.

        Query heads with own page lists share the slots of their kv head, unless the part has one
        set per query head. With fewer slots than lists, the query heads share one list: the best
        page of each in turn.
        """
        room, index = slots * self.recall.sets(self.layer), self.shared_index.index
        if room < len(pages):
            pages = interleaved(pages, self.layer.kv_heads, slots)
        there = int((pages >= 0).sum(1).max())
        pages = pages[:, : min(there, room // len(pages))].contiguous()
        members = index.contents(pages)
        versions = entries.page_versions(index.versions(pages), members)
        return PageSelection(pages, versions, members, entries.lengths)

    def _load_once(self, selection: PageSelection, entries: Entries) -> PagePool:
        """Temporary slots for one selection."""
        sets, width = selection.pages.shape
        pool = PagePool(self.layer, sets, max(1, width), self.recall.page, *self.like)
        pool.load(selection.pages, selection.versions, selection.numbers, entries)
        return pool

    def _load(self, selection: PageSelection, entries: Entries) -> PagePool:
        """Slots with the selected pages loaded."""
        pool = self._pool_of(*selection.pages.shape)
        pool.load(selection.pages, selection.versions, selection.numbers, entries)
        return pool

    def _search(
        self, queries: Queries, entries: Entries, observed: ObservedQueries
    ) -> RecallResult:
        self.update_index(entries, observed)
        return self.search(queries, entries)

    def search(self, queries: Queries, entries: Entries) -> RecallResult:
        """Search result over the indexed entries, for one query per head."""
        asked = queries[:, 0].detach().float().cpu()
        return self.shared_index.search(asked, entries, self.recall.search)

    def _pool_of(self, sets: int, width: int) -> PagePool:
        """Slots for `width` pages of each set; they grow to the budget only when there are enough
        pages."""
        before = self._pool
        if before is None or before.sets != sets or before.slots < width:
            most = max(1, self.recall.pages * self.recall.sets(self.layer) // sets)
            room = GROWTH * before.slots if before is not None and before.sets == sets else 1
            slots = max(width, min(most, room))
            pool = PagePool(self.layer, sets, slots, self.recall.page, *self.like)
            if before is not None:
                pool.requested, pool.moved = before.requested, before.moved
            self._pool = self._attach(pool, before)
        assert self._pool is not None
        return self._pool

    def _drop_pool(self) -> None:
        if self._pool is not None:
            self._pool.usage.leave()
            self._pool = None


def unindexed_rows(entries: Entries, indexed: tuple[int, ...]) -> AttendedRows:
    """Entries behind the first `indexed` of each head."""
    first, (starts, lengths) = torch.tensor(indexed), entries.layout
    return AttendedRows(entries.keys, entries.values, starts + first, lengths - first)


def attend_unindexed(
    queries: Queries, entries: Entries, indexed: tuple[int, ...], layer: LayerSpec
) -> AttentionState:
    """Attention to the entries behind the first `indexed` of each head."""
    keys, values, starts, lengths, *_ = unindexed_rows(entries, indexed)
    if queries.device != keys.device:  # entries are in host memory
        rows, starts = packed_rows(starts, lengths), starts_of(lengths)
        keys, values = keys[rows].to(queries.device), values[rows].to(queries.device)
    rows = keys, values, starts, lengths
    return ragged_attention(queries, *rows, layer.scaling, softcap=layer.softcap)


def _count_common_pages(
    needed: Int64[Tensor, "N P"], ahead: Int64[Tensor, "N Q"]
) -> tuple[int, int]:
    """Number of pages in `own`, and how many of them are in `ahead`."""
    pairs = [({*a} - {-1}, {*b}) for a, b in zip(needed.tolist(), ahead.tolist(), strict=True)]
    return sum(len(a) for a, _ in pairs), sum(len(a & b) for a, b in pairs)


class SharedIndex(TensorOwner):
    """Copy-on-write recall index of a growing slow tier, and its indexed entries per head.

    Args:
        index: index of `known` entries of each head; empty by default.
    """

    counts_as_device = False

    def __init__(
        self,
        recall: RecallPart,
        layer: LayerSpec,
        index: RecallIndex | None = None,
        known: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self._recall, self._layer = recall, layer
        self.index = recall.index(layer) if index is None else index
        self.indexed = known or (0,) * layer.kv_heads
        self._each = 0.0  # estimated index bytes per entry; 0 until first needed
        self._sharers: WeakSet[SharedIndex] = WeakSet([self])
        self._count_bytes()

    def own_tensors(self) -> tuple[Tensor, ...]:
        return self.index.tensors()

    def _count_bytes(self) -> None:
        self.usage.set_bytes(self.index.nbytes, self.counts_as_device)

    def separate(self) -> None:
        """Copy the index if forks share it."""
        if self._is_shared:
            self._own(self._copied())

    def update(self, entries: Entries, observed: Float[Tensor, "H Q D"] | None) -> None:
        """Add new entries to the index. If interrupted, the index is empty afterwards."""
        if self.indexed == entries.lengths:
            return
        self.separate()
        try:
            self.index.add(entries, observed)
        except BaseException:  # the index may contain half of them
            self._own(self._recall.index(self._layer))
            self.indexed = (0,) * self._layer.kv_heads
            self._count_bytes()
            raise
        self.indexed = entries.lengths
        self._count_bytes()

    def observe_step(
        self, queries: Float[Tensor, "H D"], stays: Entries, before: Float[Tensor, "H Q D"] | None
    ) -> None:
        """Observe the queries of a step, see `RecallIndex.observe_step`."""
        self.index.observe_step(queries, stays, before)
        self._count_bytes()

    def search(
        self, queries: Float[Tensor, "H D"], entries: Entries, mode: SearchMode
    ) -> RecallResult:
        """Pages found for one query per query head."""
        find = self.index.exact if mode is SearchMode.EXACT else self.index.find
        found = find(queries, entries, self._recall.pages)
        if not self.index.is_stateless:
            self._count_bytes()
        return found

    def fork(self) -> SharedIndex:
        """Independent copy; a stateless index is shared until one of both changes."""
        is_steady = self.index.is_stateless
        index = self.index if is_steady else self._copied()
        copy = SharedIndex(self._recall, self._layer, index, self.indexed)
        if is_steady:
            self._sharers.add(copy)
            copy._sharers = self._sharers
        return copy

    @property
    def is_used(self) -> bool:
        """True if any entry is indexed."""
        return any(self.indexed)

    def growth_estimate_bytes(self, entries: int) -> int:
        """Estimated growth in bytes until the index covers `entries` entries of all heads."""
        known = sum(self.indexed)
        if known < SAMPLE_ENTRIES * len(self.indexed):
            self._each = self._each or self._recall.entry_bytes(self._layer)
            return max(0, int(self._each * entries) - self.nbytes)
        return self.nbytes * max(0, entries - known) // known

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the index if forks share it, else 0."""
        return self.nbytes if self._is_shared else 0

    @property
    def _is_shared(self) -> bool:
        return len(self._sharers) > 1

    def _copied(self) -> RecallIndex:
        return self._recall.adopt(self._layer, self.index.state())

    def _own(self, index: RecallIndex) -> None:
        self._sharers.discard(self)
        self.index, sharers = index, WeakSet[SharedIndex]()
        sharers.add(self)
        self._sharers = sharers
