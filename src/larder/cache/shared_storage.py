"""Copy-on-write storage of forks: a layer and its forks share one until one of them changes it.

    source   [ entries of both | entries that the source appended | slack ]
    fork       the first of them, then a storage of its own

A fork copies nothing. The layer that was forked appends into its slack, which the fork does not
see; the fork appends into new storage behind the shared entries, its segments. A layer that changes
or moves shared entries copies all of its entries first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from weakref import WeakSet, ref

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from larder.cache.forms.base import CacheLayer
from larder.cache.memory_usage import storage_bytes
from larder.core.spec import LayerSpec
from larder.ops.cpu.decode_attention import StepSegment

SHORT_SEGMENT = 64  # entries of the longest head, below which a fork copies them to append
# Neighboring segments of one layer alone that are joined: a table and a loop of each step for each.
MANY_SEGMENTS = 4


class StorageHolders:
    """Layers that hold one storage, by weak reference; the first one alone may append to it."""

    def __init__(self) -> None:
        self._holders: WeakSet[object] = WeakSet()
        self._writer: ref[object] | None = None
        self._read: tuple[int, ...] = ()  # first entries of each head that others read

    def join(self, holder: object, lengths: Sequence[int]) -> None:
        """Add a holder that reads the first `lengths` entries of each head."""
        if self._writer is None:
            self._writer = ref(holder)
        if not self.is_writer(holder):
            self._read = tuple(map(max, self._read or lengths, lengths))
        self._holders.add(holder)

    def leave(self, holder: object) -> None:
        """Remove a holder."""
        self._holders.discard(holder)

    @property
    def holders(self) -> list[object]:
        """Layers that hold the storage."""
        return list(self._holders)

    def is_writer(self, holder: object) -> bool:
        """True for the layer that allocated the storage, or was alone when it was forked."""
        return self._writer is not None and self._writer() is holder

    @property
    def are_many(self) -> bool:
        """True if several layers hold the storage."""
        return len(self._holders) > 1

    def may_append(self, holder: object, lengths: Sequence[int]) -> bool:
        """True if no other holder reads the rows behind the first `lengths` entries."""
        if not self.are_many:
            return True
        return self.is_writer(holder) and all(map(int.__ge__, lengths, self._read))


@dataclass(frozen=True)
class SharedSegment:
    """Entries of one layer in storage that other layers may hold too.

    Args:
        keys, values, positions, columns: as the form stores them, in any shape.
        edges: first row of the region of each head, and the end of the last region.
        lengths: entries of each head that this layer has.
        holders: layers that hold the storage.
    """

    keys: Tensor
    values: Tensor
    positions: Int[Tensor, " C"]
    columns: Float[Tensor, "n C"]
    starts: Int64[Tensor, " K"]
    edges: tuple[int, ...]
    lengths: Int64[Tensor, " K"]
    holders: StorageHolders

    @property
    def rows(self) -> list[slice]:
        """Storage rows of each head."""
        owned = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        return [slice(start, start + length) for start, length in owned]

    @property
    def room(self) -> int:
        """Least slack behind a head."""
        stops = (rows.stop for rows in self.rows)
        return min(edge - stop for edge, stop in zip(self.edges[1:], stops, strict=True))

    @property
    def is_short(self) -> bool:
        """True if copying the entries takes less than another segment."""
        return int(self.lengths.max()) < SHORT_SEGMENT

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors; keys and values once where they are one."""
        sides = (self.keys,) if self.values is self.keys else (self.keys, self.values)
        stored = (*sides, self.positions, self.lengths, self.starts)
        return (*stored, self.columns) if self.columns.numel() else stored

    @property
    def shared_bytes(self) -> int:
        """Bytes that other layers hold too."""
        return self.stored_bytes if self.holders.are_many else 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of the storage, slack and entries of other layers included."""
        stored = (self.keys, self.values, self.positions, self.columns)
        return storage_bytes({id(each): each for each in stored}.values())

    def step_segment(self, bias: int | None) -> StepSegment:
        """Segment as the kernel of decode steps takes it.

        Args:
            bias: index of the column with biases; None for none.
        """
        dim = self.keys.shape[-1]
        sides = self.keys.view(-1, dim), self.values.view(-1, dim)
        return StepSegment(
            *sides, self.starts, self.lengths, None if bias is None else self.columns[bias]
        )


def joined_rows(segments: Sequence[SharedSegment], room: int) -> SharedSegment:
    """Entries of several ragged segments, head by head, in one new storage.

    Args:
        room: slack behind each head.
    """
    lengths = torch.stack([segment.lengths for segment in segments]).sum(0)
    ends = (lengths + room).cumsum(0)
    starts, total = ends - lengths - room, int(ends[-1])
    last = segments[-1]
    keys = last.keys.new_empty(total, last.keys.shape[-1])
    values = keys if last.values is last.keys else torch.empty_like(keys)
    positions = last.positions.new_zeros(total)
    columns = last.columns.new_zeros(len(last.columns), total)
    for head, first in enumerate(starts.tolist()):
        for segment in segments:
            rows = segment.rows[head]
            there = slice(first, first + rows.stop - rows.start)
            keys[there] = segment.keys[rows]
            if values is not keys:
                values[there] = segment.values[rows]
            positions[there] = segment.positions[rows]
            columns[:, there] = segment.columns[:, rows]
            first = there.stop
    edges = (*starts.tolist(), total)
    sides = keys, values, positions, columns
    return SharedSegment(*sides, starts, edges, lengths, StorageHolders())


class SegmentedLayer(CacheLayer):
    """Layer with one storage, and after a fork shared segments in front of it.

    A fork reads the storage of its source. It starts a storage of its own when it appends, and
    what it shares becomes a segment; whatever moves or changes entries copies all of them into
    one storage first.
    """

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        self._segments: tuple[SharedSegment, ...] = ()
        self._holders = StorageHolders()
        self._holders.join(self, ())

    @abstractmethod
    def _storage(self) -> SharedSegment:
        """Own storage, which others may hold as well, as a segment."""

    @abstractmethod
    def _use(self, storage: SharedSegment) -> None:
        """Replace the own storage by another one; the caller counts its bytes."""

    @abstractmethod
    def _joined(self, segments: Sequence[SharedSegment], room: int) -> SharedSegment:
        """Entries of several segments in one new storage, with `room` slack behind each head."""

    def _lengths_before(self, segment: SharedSegment, length: int) -> Int64[Tensor, " K"]:
        """Entries of each head of a segment at true positions before `length`."""
        heads = [segment.positions[rows] for rows in segment.rows]
        return torch.tensor([int((positions < length).sum()) for positions in heads])

    @abstractmethod
    def _like(self) -> SegmentedLayer:
        """Empty layer of the same form, with the numbers per head of this one."""

    def fork(self) -> SegmentedLayer:
        """Layer with the same entries, that shares their storage until one of both changes it."""
        if not self._holders.are_many:
            self._renew_holders()
        copy = self._like()
        copy._segments = self._segments
        for segment in self._segments:
            segment.holders.join(copy, segment.lengths.tolist())
        copy._hold(self._storage())
        return copy

    def separate(self) -> None:
        self._unshare()
        self.compact()

    def seal(self) -> None:
        if self._holders.are_many:
            storage = self._storage()
            fresh = self._joined([replace(storage, lengths=storage.lengths * 0)], 0)
            self._segments = (*self._segments, storage)
            self._hold(fresh, keeps=True)

    @property
    def num_storages(self) -> int:
        return len(self._filled)

    @property
    def like(self) -> Tensor:
        """Keys of no entry, in the dtype and on the device of the storage."""
        return self._storage().keys[:0]

    @property
    def shared_nbytes(self) -> int:
        return sum(segment.shared_bytes for segment in (*self._segments, self._storage()))

    @property
    def attention_copy_bytes(self) -> int:
        """Bytes of all entries, where they are in several storages."""
        return self.nbytes if len(self._filled) > 1 else 0

    @property
    def _filled(self) -> list[SharedSegment]:
        """Segments with entries, in order, the own storage among them."""
        return [s for s in (*self._segments, self._storage()) if s.lengths.any()]

    @property
    def _is_shared(self) -> bool:
        """True if some entries are in storage that others hold, or in several storages."""
        return bool(self._segments) or self._holders.are_many

    @property
    def _segment_entries(self) -> int:
        """Entries in the segments, over all heads."""
        return sum(int(segment.lengths.sum()) for segment in self._segments)

    def _read_storage(self) -> SharedSegment:
        """All entries in one storage to read from, copied if they are in several ones."""
        if not self._segments:
            return self._storage()
        held = self._filled
        return held[0] if len(held) == 1 else self._joined(held, 0)

    def _step_segments(self, bias: int | None = None) -> tuple[StepSegment, ...]:
        """Segments as the kernel of decode steps takes them."""
        return tuple(segment.step_segment(bias) for segment in self._segments)

    def _start_storage(self, room: int, growth: int) -> None:
        """Ensure that the storage can be appended to, and has room if it is shared.

        Args:
            room: slack that is needed behind each head.
            growth: slack of new storage.
        """
        if not self._holders.are_many:
            return
        storage = self._storage()
        may_append = self._holders.may_append(self, storage.lengths.tolist())
        if may_append and storage.room >= room:
            return
        self.replaced_bytes = 0
        if storage.is_short:
            self._hold(self._joined([storage], growth))
        else:
            fresh = self._joined([replace(storage, lengths=storage.lengths * 0)], growth)
            self._rejoin()
            self._segments = (*self._segments, storage)
            self._hold(fresh, keeps=True)

    def _rejoin(self) -> None:
        """Join neighboring segments that no other layer holds any more, where they are many."""
        stay = list[SharedSegment]()
        for is_shared, run in groupby(self._segments, lambda each: each.holders.are_many):
            found = list(run)
            if not is_shared and len(found) >= MANY_SEGMENTS:
                found = [self._joined(found, 0)]
                found[0].holders.join(self, found[0].lengths.tolist())
            stay += found
        if len(stay) < len(self._segments):
            self._leave_segments(stay)
            self._count_bytes()

    def _unshare(self, room: int = 0) -> None:
        """Bring all entries into one storage that no other layer holds, before they change.

        Args:
            room: least slack behind each head, where the entries are copied.
        """
        if not self._is_shared:
            return
        if self._segments or self._holders.is_writer(self):
            room = max(room, self._storage().room)
        joined = self._joined([*self._segments, self._storage()], room)
        self.replaced_bytes = self.nbytes
        self._leave_segments(())
        self._hold(joined)

    def _unshare_segments(self) -> None:
        """Bring entries in several storages into one; what others hold alone stays shared."""
        if self._segments:
            self._unshare()

    def _cut_segments(self, length: int) -> None:
        """Drop the entries of the segments at true positions `length` and later."""
        cut = [replace(s, lengths=self._lengths_before(s, length)) for s in self._segments]
        self._leave_segments([segment for segment in cut if segment.lengths.any()])

    def _drop_empty_storage(self) -> None:
        """Give up an own storage without entries, and use the last segment instead."""
        if not self._segments or self._storage().lengths.any():
            return
        last = self._segments[-1]
        self._segments = self._segments[:-1]
        self._hold(last)

    def _compact_segments(self) -> None:
        """Free the slack of segments that no other layer holds, and of an unused storage."""
        self._drop_empty_storage()
        if not any(segment.holders.are_many for segment in self._segments):
            self._unshare_segments()

    def _hold(self, storage: SharedSegment, keeps: bool = False) -> None:
        """Replace the own storage, and count the bytes."""
        if not keeps:
            self._holders.leave(self)
        self._holders = storage.holders
        self._holders.join(self, storage.lengths.tolist())
        self._use(storage)
        self._count_bytes()

    def _renew_holders(self) -> None:
        """Become the only holder, and the writer, of the own storage."""
        self._holders.leave(self)
        self._holders = StorageHolders()
        self._holders.join(self, ())

    def _leave_segments(self, stay: Sequence[SharedSegment]) -> None:
        """Hold only some of the segments."""
        held = {id(segment.holders) for segment in stay}
        for segment in self._segments:
            if id(segment.holders) not in held:
                segment.holders.leave(self)
        self._segments = tuple(stay)

    def _segment_tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for segment in self._segments for tensor in segment.tensors())

    def _all_lengths(self, own: Int64[Tensor, " K"]) -> tuple[int, ...]:
        """Entries of each head, given those in the own storage."""
        if not self._segments:
            return tuple(own.tolist())
        counts = torch.stack([own, *(segment.lengths for segment in self._segments)])
        return tuple(counts.sum(0).tolist())
