"""Tables of a decode step: where the new entries of all sequences go, and what they attend to.

Built on the host once per pass for all layers, and written into the same device memory in every
pass, so that a captured graph reads them. A step that only appends within the present pages changes
them on the device, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64
from numpy.typing import NDArray
from torch import Tensor

from larder.cache.layer_pages import NULL_PAGE, LayerPages
from larder.cache.page_lease import PageLease
from larder.ops.attention import apply_sinks
from larder.ops.packing import write_to_device
from larder.ops.paged_attention import paged_attention
from larder.ops.pages import SegmentTables

if TYPE_CHECKING:  # few policies evict by kernels
    from larder.cache.page_evictions import EvictionTables

PADDING_LENGTH = 1  # entries of a padded segment, in the null page: kernels see no empty one


class StepAttention(NamedTuple):
    """Queries of a decode step by segment, and the log-sum-exp of their logits, biases included."""

    queries: Float[Tensor, "S R 1 D"]
    lse: Float[Tensor, "S R 1"]


class LayerStep(NamedTuple):
    """Tables of one layer in a decode step of B sequences; segment b * K + k is head k of b.

    Args:
        slots: row of the pages that each new entry is written to.
        biases: added to the logits of the entries; None for none.
    """

    pages: LayerPages
    slots: Int64[Tensor, " S"]
    tables: SegmentTables
    biases: Float[Tensor, "N P"] | None = None

    def attend(
        self,
        queries: Float[Tensor, "H B D"],
        keys: Float[Tensor, "K B D"],
        values: Float[Tensor, "K B D"],
    ) -> tuple[Float[Tensor, "H B D"], StepAttention]:
        """Append an entry to every head, and attend: no read on the host, at fixed addresses.

        The addresses are those of the pages until the arena grows. The output is under the sinks of
        the layer, in the dtype of the queries; beside it, what weights of attention follow from.
        """
        kv_heads, batch_len, _ = keys.shape
        pages, layer = self.pages, self.pages.layer
        pages.append_step(self.slots, keys, values)
        grouped = queries.unflatten(0, (kv_heads, -1)).permute(2, 0, 1, 3)  # [B, K, R, D]
        asked = grouped.flatten(0, 1).unsqueeze(2)
        out, lse = paged_attention(
            asked,
            pages.keys,
            pages.values,
            self.tables,
            layer.scaling,
            pages.backend,
            self.biases,
            layer.softcap,
        )
        shape = batch_len, len(queries)
        heads = out.reshape(*shape, -1).transpose(0, 1)
        done = apply_sinks(heads, lse.reshape(shape).T, pages.sinks).to(queries.dtype)
        return done, StepAttention(asked, lse)


class BlockTables:
    """Tables of steps of up to `batch_len` sequences, at fixed addresses.

    Missing sequences are padded by segments of one entry in the null page.

    Args:
        positions: true positions in the pages of all layers.
        columns: ledger columns in the pages of all layers.
        pages: pages of each layer.
        width: most pages of a kv head.
        is_biased: whether attention adds the column with biases, if there is one.
    """

    def __init__(
        self,
        positions: Int32[Tensor, "L N P"],
        columns: Float[Tensor, "n L N P"],
        pages: Sequence[LayerPages],
        batch_len: int,
        width: int,
        is_biased: bool,
    ) -> None:
        self.batch_len, self.width = batch_len, width
        self._all_positions, device = positions, positions.device
        self._all_columns = columns.flatten(1)
        self._heads = [store.layer.kv_heads for store in pages]
        self.sizes = sizes = [batch_len * heads for heads in self._heads]
        total, rows = sum(sizes), positions[0].numel()
        self._table = torch.zeros(total, width, dtype=torch.int32, device=device)
        self.lengths = torch.full((total,), PADDING_LENGTH, dtype=torch.int32, device=device)
        self.positions = torch.zeros(total, dtype=torch.int32, device=device)
        self._slots = torch.zeros(total, dtype=torch.int64, device=device)
        # What a step adds to lengths and slots, and to positions; 0 for padding.
        self._growth = torch.zeros(total, dtype=torch.int32, device=device)
        self._ages = torch.zeros_like(self._growth)
        firsts = np.repeat(np.arange(len(pages)) * rows, sizes)
        self._firsts = torch.from_numpy(firsts).to(device)  # of each layer in `positions`
        self._layer_firsts = np.cumsum([0, *sizes])
        self._host = HostTables(total, width)
        self._seen: list[int] = []
        self._next: list[int] = []
        self._marks: list[int] = []  # by how much the marks of leases grew last
        self.evictions: EvictionTables | None = None  # once a step evicts
        self.layers = {
            store.layer.index: _layer_step(store, slots, table, lengths, is_biased)
            for store, slots, table, lengths in zip(
                pages,
                self._slots.split(sizes),
                self._table.split(sizes),
                self.lengths.split(sizes),
                strict=True,
            )
        }

    def update(self, leases: Sequence[Sequence[PageLease]], positions: Sequence[int]) -> None:
        """Set the tables, and write the positions of the new entries, and zeros in their columns.

        Args:
            leases: of each sequence, one per layer; pages for another entry are reserved.
            positions: true position of each new entry.
        """
        seen = [lease.mark for of_sequence in leases for lease in of_sequence]
        host, is_next = self._host, [position - 1 for position in positions] == self._next
        if is_next and len(seen) == len(self._seen):
            marks = [mark - before for mark, before in zip(seen, self._seen, strict=True)]
            changed = [index for index, mark in enumerate(marks) if mark not in (1, 2)]
            self._set_growth(marks)
            host.grow()
        else:
            host.clear()
            changed, self._marks = range(len(seen)), [1] * len(seen)
        for index in changed:
            sequence, layer = divmod(index, len(self._heads))
            own = self.segments(sequence, layer)
            host.write(own, leases[sequence][layer], positions[sequence])
            self._marks[index] = 1
        if changed:
            targets = self._table, self.lengths, self._slots, self.positions
            for target, source in zip(
                (*targets, self._growth, self._ages), host.arrays, strict=True
            ):
                write_to_device(target, source)
        else:
            for array in (self.lengths, self._slots):
                array.add_(self._growth)
            self.positions.add_(self._ages)
        self._seen, self._next = seen, list(positions)
        rows = self._slots + self._firsts
        self._all_positions.view(-1).index_copy_(0, rows, self.positions)
        if len(self._all_columns):
            self._all_columns.index_fill_(1, rows, 0.0)

    def segments(self, sequence: int, layer: int) -> slice:
        """Segments of the heads of a layer, which is counted among those with pages."""
        heads = self._heads[layer]
        first = int(self._layer_firsts[layer]) + sequence * heads
        return slice(first, first + heads)

    def _set_growth(self, marks: Sequence[int]) -> None:
        """Set by how much rows advance in a step, from the growth of the marks of leases."""
        if marks == self._marks:
            return
        for index, (mark, before) in enumerate(zip(marks, self._marks, strict=True)):
            if mark != before and mark in (1, 2):
                own = self.segments(*divmod(index, len(self._heads)))
                self._host.growth[own] = 2 - mark
        self._marks = list(marks)
        write_to_device(self._growth, self._host.growth)


class HostTables:
    """Tables of a step in host memory, segment by segment; copied to the device when they change.

    Args:
        total: number of segments, padding included.
        width: most pages of a segment.
    """

    def __init__(self, total: int, width: int) -> None:
        self.table = np.zeros((total, width), np.int32)
        self.lengths, self.positions, self.growth, self.ages = np.zeros((4, total), np.int32)
        self.slots = np.zeros(total, np.int64)
        self.clear()

    @property
    def arrays(self) -> tuple[NDArray[np.integer], ...]:
        """Table, lengths, slots, positions, and what a step adds to them."""
        return self.table, self.lengths, self.slots, self.positions, self.growth, self.ages

    def clear(self) -> None:
        """Make all segments padding."""
        for array in self.arrays:
            array[...] = 0
        self.lengths[...] = PADDING_LENGTH

    def grow(self) -> None:
        """Count one more token in all segments but padding."""
        for array in (self.lengths, self.slots):
            array += self.growth
        self.positions += self.ages

    def write(self, segments: slice, lease: PageLease, position: int) -> None:
        """Set the segments of a lease that takes another entry."""
        self.table[segments] = NULL_PAGE
        self.table[segments, : lease.table.shape[1]] = lease.table
        self.lengths[segments] = lease.lengths + 1
        self.slots[segments] = lease.slots(np.ones(len(lease.lengths), np.int64))
        self.positions[segments] = position
        self.growth[segments] = self.ages[segments] = 1


def own_pages(leases: Iterable[Sequence[PageLease]]) -> None:
    """Copy pages that other leases hold too, of sequences whose entries change.

    Raises:
        CacheError: there is no room for the copies.
    """
    for layer_leases in leases:
        for lease in layer_leases:
            lease.own_pages()


def reserve_step(leases: Sequence[Sequence[PageLease]]) -> None:
    """Reserve pages for one more entry in each head.

    Raises:
        CacheError: none are left.
    """
    for layer_leases in leases:
        for lease in layer_leases:
            if not lease.has_room:
                lease.reserve(1)


def _layer_step(
    pages: LayerPages, slots: Tensor, table: Tensor, lengths: Tensor, is_biased: bool
) -> LayerStep:
    """Tables of one layer as views, with offsets that never change."""
    ahead = torch.arange(len(slots) + 1, dtype=torch.int32, device=table.device)
    room = table.shape[1] * pages.page_tokens
    tables = SegmentTables(table, lengths, ahead, ahead * room)
    return LayerStep(pages, slots, tables, pages.biases if is_biased else None)
