"""Leases that sequences have of the pages of a layer.

    lease   pages of each kv head of one layer of one sequence, in order

Which pages a lease has, and how many entries, is known on the host; the entries are on the device.
Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from weakref import finalize

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from numpy.typing import NDArray
from torch import Tensor

from larder.cache.layer_pages import NULL_PAGE, LayerPages
from larder.core.part import LOG_COUNT, Ledger
from larder.ops.packing import copy_to_device, device_tensor
from larder.ops.pages import SegmentTables, compact_pages, gather_pages

NUMBER_BYTES = 4  # of a column or scalar, float32
CHANGE, SERIAL_BITS = 1 << 12, 64  # how marks of leases grow, and where their serials begin
IntArray = NDArray[np.int64]


class PageLease:
    """Pages of the kv heads of one layer of one sequence.

    Args:
        ledger: columns and scalars of the sequence, which the pool holds.

    Attributes:
        table: pages of each head [K, W], on the host; the null page behind the last one.
        num_pages: pages of all heads.
        mark: number that no other lease of the layer ever has. It grows by one with an entry in the
            row behind the latest one of each head, by two if one has gone besides, so that the next
            entry gets the same row, and by more with any other change.
    """

    def __init__(self, pool: LayerPages, ledger: Ledger) -> None:
        heads = pool.layer.kv_heads
        self.pool, self.mark = pool, next(pool.serials) << SERIAL_BITS
        self.ledger = ledger
        self._least_pages = 1 if ledger.scalars else 0  # of a head that was written to
        self._may_share = False  # whether other leases may hold a page
        self._before_step = 0, 0, 0  # mark, room and page room
        self._room = 0  # entries that surely fit each head, in pages of its own
        self._page_room = 0  # entries until a head begins another page
        self._lengths: IntArray = np.zeros(heads, np.int64)
        self._steps = 0  # entries of each head that are not in these
        self.table = np.zeros((heads, 1), np.int32)
        self.num_pages = 0
        self._pages: list[list[int]] = [[] for _ in range(heads)]
        finalize(self, _release_all, pool, self._pages)

    @property
    def lengths(self) -> IntArray:
        """Entries of each head [K]."""
        if self._steps:
            self._lengths, self._steps = self._lengths + self._steps, 0
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: IntArray) -> None:
        self._lengths, self._steps = lengths, 0

    @property
    def has_room(self) -> bool:
        """True if another entry surely fits each head."""
        return self._room > 0

    @property
    def pages(self) -> list[int]:
        """Pages of all heads, head by head."""
        return [page for own in self._pages for page in own]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, with the numbers of the sequence's ledger."""
        numbers = len(self.ledger.columns) * self.pool.page_tokens + len(self.ledger.scalars)
        return self.pool.page_bytes + NUMBER_BYTES * numbers

    @property
    def has_biases(self) -> bool:
        """True if the sequence has a column that attention adds to logits."""
        return LOG_COUNT in self.ledger.columns

    @property
    def shared_pages(self) -> int:
        """Pages that other leases hold too."""
        return sum(map(self.pool.is_shared, self.pages))

    def reserve(self, room: int | Int64[np.ndarray, " K"]) -> None:
        """Reserve pages for `room` more entries in each head, which no other lease reads.

        Raises:
            CacheError: the pool has no pages left; nothing has changed.
        """
        if isinstance(room, int) and room <= self._room:
            return
        size = self.pool.page_tokens
        counts = [len(pages) for pages in self._pages]
        wanted = [self._pages_for(int(length)) for length in self.lengths + room]
        missing = [range(have, want) for have, want in zip(counts, wanted, strict=True)]
        written = [self._written_pages(head) for head in range(len(counts))]
        copied = [[n for n in own if self._is_shared(head, n)] for head, own in enumerate(written)]
        taken = iter(self.pool.take(sum(map(len, (*missing, *copied)))))
        for pages, numbers in zip(self._pages, missing, strict=True):
            pages += [next(taken) for _ in numbers]
        fresh = [own for own, had in zip(self._pages, counts, strict=True) if own and not had]
        self._clear_scalars([own[0] for own in fresh])
        for head, numbers in enumerate(copied):
            for number in numbers:
                self._replace(head, number, next(taken))
        if any(map(len, missing)) or any(copied):
            self._changed()
        held = np.array([len(pages) for pages in self._pages]) * size
        self._room = int((held - self.lengths).min())

    def slots(self, counts: IntArray) -> IntArray:
        """Pool rows of the next `counts` entries of each head, head by head; they are reserved."""
        return self._rows(self.lengths, counts)

    def packed_rows(self) -> IntArray:
        """Pool rows of all entries, head by head."""
        return self._rows(self.lengths * 0, self.lengths)

    def _rows(self, firsts: IntArray, counts: IntArray) -> IntArray:
        """Pool rows of entries [firsts, firsts + counts) of each head."""
        heads, size = np.repeat(np.arange(len(counts)), counts), self.pool.page_tokens
        indices = np.arange(len(heads)) + np.repeat(firsts - counts.cumsum() + counts, counts)
        return self.table[heads, indices // size].astype(np.int64) * size + indices % size

    def count(self, entries: int | Int64[np.ndarray, " K"]) -> None:
        """Count entries that were appended to each head within its pages."""
        self.lengths = self.lengths + entries
        self._room -= int(np.max(entries))
        self._begin_page()

    def count_step(self) -> None:
        """Count an entry that was appended to each head within its pages."""
        self._before_step = self.mark, self._room, self._page_room
        self._steps += 1
        self._room -= 1
        self.mark += 1
        self._page_room -= 1
        if self._page_room <= 0:
            self._begin_page()

    def count_step_eviction(self, count: int) -> None:
        """Count the entry that went from each head with one more than `count`, behind a step.

        Its rows are free for the next one: pages stay as they are.
        """
        former = self.lengths
        self.lengths = np.minimum(former, count)
        if (self.lengths < former).all():  # as before the step
            self.mark, self._room, self._page_room = self._before_step
            self.mark += 2
        elif (self.lengths < former).any():
            self._begin_page()

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Keep the first entries of each head, and release the pages behind them.

        A head with scalars keeps its first page.
        """
        self.lengths = np.array(lengths, np.int64)
        for pages, length in zip(self._pages, lengths, strict=True):
            kept = self._pages_for(length)
            self.pool.release(pages[kept:])
            del pages[kept:]
        self._changed()

    def _own_first(self, counts: Sequence[int]) -> None:
        """Copy those of the first `counts` pages of each head that other leases hold too."""
        shared = [
            (head, number)
            for head, pages in enumerate(self._pages)
            for number, page in enumerate(pages[: counts[head]])
            if self.pool.is_shared(page)
        ]
        fresh = self.pool.take(len(shared))
        for (head, number), page in zip(shared, fresh, strict=True):
            self._replace(head, number, page)
        self._changed()

    def own_pages(self) -> None:
        """Copy the pages that other leases hold too, so that numbers of all entries may change.

        Raises:
            CacheError: the pool has too few for their copies; nothing has changed.
        """
        if self._may_share:
            self._own_first([len(pages) for pages in self._pages])
            self._may_share = False

    def fork(self) -> PageLease:
        """Lease of the same entries; pages are copied when one of both writes into them."""
        copy = PageLease(self.pool, self.ledger)
        copy._may_share = self._may_share = True
        for copied, pages in zip(copy._pages, self._pages, strict=True):
            copied += pages
            self.pool.share(pages)
        copy.lengths = self.lengths.copy()
        copy._changed()
        self._room = 0
        return copy

    def tables(self, query_len: int) -> SegmentTables:
        """Tables of the heads on the device, for queries of this layer alone."""
        device, heads = self.pool.keys.device, len(self.lengths)
        room = self.table.shape[1] * self.pool.page_tokens
        offsets = torch.arange(heads + 1, dtype=torch.int32, device=device)
        table = copy_to_device(self.table, device)
        lengths = copy_to_device(self.lengths.astype(np.int32), device)
        return SegmentTables(table, lengths, offsets * query_len, offsets * room)

    def gather(self) -> tuple[Tensor, Tensor, Int[Tensor, " T"]]:
        """Copies of keys, values and positions of all heads, end to end."""
        tables, total = self.tables(1), int(self.lengths.sum())
        starts = copy_to_device(self.lengths.cumsum() - self.lengths, tables.table.device)
        layout = tables.table, tables.lengths, starts, total
        pool = self.pool
        positions = gather_pages(pool.positions.unsqueeze(2), *layout).squeeze(1)
        return gather_pages(pool.keys, *layout), gather_pages(pool.values, *layout), positions

    def gather_columns(self) -> Float[Tensor, "n T"]:
        """Copies of the columns of all heads, end to end."""
        total = int(self.lengths.sum())
        found = self.pool.columns.new_zeros(len(self.ledger.columns), total)
        if len(found):
            rows = copy_to_device(self.packed_rows(), found.device)
            for own, name in zip(found, self.ledger.columns, strict=True):
                own.copy_(self.pool.column(name).flatten()[rows])
        return found

    def gather_scalars(self) -> dict[str, Float[Tensor, " K"]]:
        """Copies of the scalars of all heads, by name."""
        if not self.ledger.scalars:
            return {}
        device, has_pages = self.pool.scalars.device, [bool(pages) for pages in self._pages]
        pages = copy_to_device(self.table[:, 0].astype(np.int64), device)
        is_held = copy_to_device(np.array(has_pages), device)
        held = {name: self.pool.scalar(name)[pages] for name in self.ledger.scalars}
        return {name: own.masked_fill(~is_held, torch.nan) for name, own in held.items()}

    def write_scalars(self, scalars: Mapping[str, Float[Tensor, " K"]]) -> None:
        """Replace scalars. Raises: CacheError: see `own_pages`."""
        if not scalars:
            return
        self.reserve(np.zeros(len(self._pages), np.int64))  # a page of every head
        self.own_pages()
        pages = copy_to_device(self.table[:, 0].astype(np.int64), self.pool.scalars.device)
        for name, numbers in scalars.items():
            self.pool.scalar(name).index_copy_(0, pages, numbers.to(self.pool.scalars))

    def _clear_scalars(self, pages: Sequence[int]) -> None:
        """Make the scalars of heads that get their first page unknown."""
        if pages and len(self.pool.scalars):
            indices = device_tensor(pages, self.pool.scalars.device)
            self.pool.scalars.index_fill_(1, indices, torch.nan)

    def write_columns(self, columns: Mapping[str, Float[Tensor, " T"]]) -> None:
        """Replace columns, given one number per entry, head by head.

        Raises:
            CacheError: see `own_pages`.
        """
        if not columns:
            return
        self.own_pages()
        rows = copy_to_device(self.packed_rows(), self.pool.keys.device)
        for name, numbers in columns.items():
            held = self.pool.column(name).view(-1)
            held.index_copy_(0, rows, numbers.to(held))

    def compact(self, kept: Int64[Tensor, " T"], lengths: Sequence[int]) -> None:
        """Keep some entries, in order, and release the pages behind them.

        Args:
            kept: packed indices, ascending.
            lengths: how many of each head.

        Raises:
            CacheError: shared pages are written to, and the pool has too few for their copies;
                nothing has changed.
        """
        self._own_first([self._pages_for(length) for length in lengths])
        counts, heads = np.array(lengths, np.int64), len(lengths)
        device, widest = self.pool.keys.device, max(int(counts.max()), 1)
        starts = self.lengths.cumsum() - self.lengths
        columns = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        rows = np.repeat(np.arange(heads) * widest, counts) + columns
        indices = kept.to(device) - copy_to_device(np.repeat(starts, counts), device)
        padded = torch.zeros(heads * widest, dtype=torch.int32, device=device)
        padded.index_copy_(0, copy_to_device(rows, device), indices.int())
        table = copy_to_device(self.table, device)
        layout = table, table, padded.view(heads, widest)
        limits = copy_to_device(counts.astype(np.int32), device)
        numbers = self.pool.positions, *map(self.pool.column, self.ledger.columns)
        for stored in (self.pool.keys, self.pool.values, *(own.unsqueeze(2) for own in numbers)):
            compact_pages(stored, *layout, limits)
        self.set_lengths(lengths)
        self._may_share = False

    def _pages_for(self, length: int) -> int:
        """Pages of a head of some entries."""
        return max(-(-length // self.pool.page_tokens), self._least_pages)

    def _written_pages(self, head: int) -> range:
        """Numbers of the present pages of a head that the next entry is written into, or later."""
        return range(int(self.lengths[head]) // self.pool.page_tokens, len(self._pages[head]))

    def _is_shared(self, head: int, number: int) -> bool:
        return self.pool.is_shared(self._pages[head][number])

    def _replace(self, head: int, number: int, fresh: int) -> None:
        """Copy a page into a fresh one and hold that instead."""
        former = self._pages[head][number]
        self.pool.copy_page(former, fresh)
        self.pool.release([former])
        self._pages[head][number] = fresh

    def _changed(self) -> None:
        """Write the table again."""
        width = max(1, *map(len, self._pages))
        self.table = np.full((len(self._pages), width), NULL_PAGE, np.int32)
        for head, pages in enumerate(self._pages):
            self.table[head, : len(pages)] = pages
        self.num_pages = sum(map(len, self._pages))
        self._room = 0
        self._begin_page()

    def _begin_page(self) -> None:
        """Note that the next entries are not in the rows behind the latest ones."""
        size = self.pool.page_tokens
        self._page_room = int((size - self.lengths % size).min())
        self.mark += CHANGE


def has_biases(leases: Iterable[Sequence[PageLease]]) -> bool:
    """True if a sequence has a column that attention adds to logits.

    Args:
        leases: of each sequence, one per layer.
    """
    return any(own[0].has_biases for own in leases)


def _release_all(pool: LayerPages, pages: list[list[int]]) -> None:
    pool.release([page for own in pages for page in own])
