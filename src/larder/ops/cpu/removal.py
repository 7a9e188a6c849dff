"""Removal of rows on a CPU: one kernel moves the runs of kept rows of all storages."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Int64
from numpy.typing import NDArray
from torch import Tensor

from larder.ops.cpu.c_library import INTEGER, MoveCall, c_library, integers
from larder.ops.cpu.decode_attention import SPAN_FLOATS, num_threads_for

BYTES_PER_FLOAT = 16  # moving this many bytes takes about as long as attending to one float


ROOM, BAD = -2, -1  # fields of `struct removal` of c/removal.c


class RowRemoval(NamedTuple):
    """Kept rows of one storage in host memory; arguments as for `remove_rows`.

    Args:
        storages: contiguous tensors with a row per row of the storage.
        starts, lengths: changed in place by a removal; contiguous.
        kept: in host memory, contiguous.
        edges: first row of the region of each head, and the end of the last region.
    """

    storages: Sequence[Tensor]
    starts: Int64[Tensor, " K"]
    lengths: Int64[Tensor, " K"]
    kept: Int64[Tensor, " kept"]
    new_lengths: tuple[int, ...]
    edges: tuple[int, ...]


def supports(storages: Sequence[Tensor]) -> bool:
    """True for contiguous storages in host memory."""
    return all(storage.device.type == "cpu" and storage.is_contiguous() for storage in storages)


def remove_rows(
    storages: Sequence[Tensor],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    kept: Int64[Tensor, " kept"],
    new_lengths: tuple[int, ...],
    new_starts: Int64[Tensor, " K"],
) -> int | None:
    """Kernel of `remove_rows`; thread-safe on different storages."""
    kept = kept.cpu().contiguous()
    bad, rows = _check_kept(kept, starts, new_starts, lengths, new_lengths)
    if bad >= 0:
        return bad
    move_rows(storages, starts, lengths, kept, new_lengths, new_starts, rows)
    return None


def _check_kept(
    kept: Int64[Tensor, " kept"],
    starts: Int[Tensor, " K"],
    new_starts: Int64[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    new_lengths: tuple[int, ...],
) -> tuple[int, int]:
    """First head with invalid kept entries, or -1; and the number of rows to move."""
    library = c_library()
    if library is None:
        from larder.ops.cpu import removal_kernels as kernels  # compiles: not before it is needed

        layout = (starts.numpy(), new_starts.numpy(), lengths.numpy())
        bad, moved = kernels.check_kept(kept.numpy(), *layout, np.array(new_lengths, np.int64))
        return int(bad), int(moved)
    rows = INTEGER()
    starts, new_starts, lengths = (x.contiguous() for x in (starts, new_starts, lengths))
    bad = library.larder_check_kept(
        kept.data_ptr(),
        starts.data_ptr(),
        new_starts.data_ptr(),
        lengths.data_ptr(),
        integers(new_lengths),
        len(new_lengths),
        byref(rows),
    )
    return bad, rows.value


def move_rows(
    storages: Sequence[Tensor],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    kept: Int64[Tensor, " kept"],
    new_lengths: tuple[int, ...],
    new_starts: Int64[Tensor, " K"],
    rows: int,
) -> None:
    """Carry out a valid removal that moves `rows` rows."""
    if not rows:
        return
    library = c_library()
    pointers = [storage.data_ptr() for storage in storages]
    row_bytes = [storage.stride(0) * storage.itemsize for storage in storages]
    work = rows * sum(row_bytes) // BYTES_PER_FLOAT
    if library is None:
        from larder.ops.cpu import removal_kernels as kernels

        threads = num_threads_for(work)
        run = kernels.move_in_parallel if threads > 1 else kernels.move_serially
        run(
            np.array(pointers, np.int64),
            np.array(row_bytes, np.int64),
            kept.contiguous().numpy(),
            starts.numpy(),
            new_starts.numpy(),
            lengths.numpy(),
            np.array(new_lengths, np.int64),
            threads,
        )
        return
    addresses, sizes, counts = integers(pointers), integers(row_bytes), integers(new_lengths)
    kept, starts, new_starts, lengths = (
        x.contiguous() for x in (kept, starts, new_starts, lengths)
    )
    call = MoveCall(
        storages=addressof(addresses),
        row_bytes=addressof(sizes),
        count=len(storages),
        kept=kept.data_ptr(),
        starts=starts.data_ptr(),
        new_starts=new_starts.data_ptr(),
        lengths=lengths.data_ptr(),
        new_lengths=addressof(counts),
        heads=len(new_lengths),
        shares=max(min(torch.get_num_threads(), work // SPAN_FLOATS), 1),
    )
    library.larder_move_rows(byref(call))


def plan_removal(
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    kept: Int64[Tensor, " kept"],
    new_lengths: tuple[int, ...],
    edges: tuple[int, ...],
    roomy: int,
) -> tuple[int | None, Int64[Tensor, " K"], int, int]:
    """Kernel of `plan_removal`; thread-safe.

    Returns:
        The first head whose kept entries are invalid, or None; then the fields of a plan.
    """
    library, new_starts = c_library(), torch.empty_like(starts)
    kept, starts, lengths = kept.contiguous(), starts.contiguous(), lengths.contiguous()
    if library is None:
        from larder.ops.cpu import removal_kernels as kernels  # compiles: not before it is needed

        bad, least, moved = kernels.plan_removal(
            kept.numpy(),
            starts.numpy(),
            lengths.numpy(),
            np.array(new_lengths, np.int64),
            np.array(edges, np.int64),
            roomy,
            new_starts.numpy(),
        )
        return (None if bad < 0 else int(bad)), new_starts, int(least), int(moved)
    room, rows = INTEGER(), INTEGER()
    bad = library.larder_plan_removal(
        kept.data_ptr(),
        starts.data_ptr(),
        lengths.data_ptr(),
        integers(new_lengths),
        integers(edges),
        len(new_lengths),
        roomy,
        new_starts.data_ptr(),
        byref(room),
        byref(rows),
    )
    return (None if bad < 0 else bad), new_starts, room.value, rows.value


@cache
def removes_together() -> bool:
    """True if the C library is there and removes rows of many storages in one call."""
    library = c_library()
    return library is not None and hasattr(library, "larder_remove_planned")


class RemovalTable:
    """Removals from different storages as the C kernel takes them, planned but not carried out.

    Args:
        removals: of storages that `supports` allows, where `removes_together`.
        roomy: least slack at which the front of a head may move.
    """

    def __init__(self, removals: Sequence[RowRemoval], roomy: int) -> None:
        library = c_library()
        assert library is not None
        self._library, self._removals = library, removals
        heads = [len(own.new_lengths) for own in removals]
        numbers = [each for own in removals for each in (*own.new_lengths, *own.edges)]
        self._numbers = np.array(numbers, np.int64)
        self._new_starts = np.empty(sum(heads), np.int64)
        self._storages = np.array(
            [
                (each.data_ptr(), each.stride(0) * each.itemsize)
                for own in removals
                for each in own.storages
            ],
            np.int64,
        ).T.copy()  # [2, storages]: addresses, and bytes of a row
        self._rows = self._fields(heads)
        address, count = self._rows.ctypes.data, len(removals)
        self._moved = library.larder_plan_removals(address, count, roomy)

    @property
    def invalid(self) -> tuple[int, int] | None:
        """Index of a removal and of a head whose kept entries are invalid; None without one."""
        bad = self._rows[:, BAD]
        found = np.flatnonzero(bad >= 0)
        return (int(found[0]), int(bad[found[0]])) if len(found) else None

    def move(self) -> list[int]:
        """Carry out the removals, and return the least slack behind a head of each storage."""
        storages = self._removals[0].storages
        row_bytes = sum(each.stride(0) * each.itemsize for each in storages)
        work = self._moved * row_bytes // BYTES_PER_FLOAT
        threads = max(min(torch.get_num_threads(), len(self._rows), work // SPAN_FLOATS), 1)
        self._library.larder_remove_planned(self._rows.ctypes.data, len(self._rows), threads)
        return self._rows[:, ROOM].tolist()

    def _fields(self, heads: Sequence[int]) -> NDArray[np.int64]:
        """Fields of `struct removal` of c/removal.c."""
        item = self._numbers.itemsize
        numbers, new_starts = self._numbers.ctypes.data, self._new_starts.ctypes.data
        addresses, sizes = (side.ctypes.data for side in self._storages)
        rows: list[tuple[int, ...]] = []
        for own, count in zip(self._removals, heads, strict=True):
            kept, starts, lengths = (x.data_ptr() for x in (own.kept, own.starts, own.lengths))
            edges = numbers + count * item
            pointers = addresses, sizes, kept, numbers, edges, new_starts, starts, lengths
            rows.append((*pointers, len(own.storages), count, 0, -1))
            numbers += (2 * count + 1) * item
            new_starts += count * item
            addresses += len(own.storages) * item
            sizes += len(own.storages) * item
        return np.array(rows, np.int64)
