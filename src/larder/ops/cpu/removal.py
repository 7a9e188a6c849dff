"""Removal of rows on a CPU: one kernel moves the runs of kept rows of all storages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from larder.ops.cpu.decode_attention import num_threads_for

BYTES_PER_FLOAT = 16  # moving this many bytes takes about as long as attending to one float


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
    from larder.ops.cpu import removal_kernels as kernels  # compiles: not before it is needed

    packed = kept.cpu().contiguous().numpy()
    counts = np.array(new_lengths, np.int64)
    bad, rows = kernels.check_kept(
        packed, starts.numpy(), new_starts.numpy(), lengths.numpy(), counts
    )
    if bad >= 0:
        return int(bad)
    move_rows(storages, starts, lengths, kept.cpu(), new_lengths, new_starts, int(rows))
    return None


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
    from larder.ops.cpu import removal_kernels as kernels

    if not rows:
        return
    addresses = np.array([storage.data_ptr() for storage in storages], np.int64)
    row_bytes = np.array([s.stride(0) * s.itemsize for s in storages], np.int64)
    packed, counts = kept.contiguous().numpy(), np.array(new_lengths, np.int64)
    threads = num_threads_for(int(rows * row_bytes.sum()) // BYTES_PER_FLOAT)
    run = kernels.move_in_parallel if threads > 1 else kernels.move_serially
    run(
        addresses,
        row_bytes,
        packed,
        starts.numpy(),
        new_starts.numpy(),
        lengths.numpy(),
        counts,
        threads,
    )


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
    from larder.ops.cpu import removal_kernels as kernels  # compiles: not before it is needed

    packed, new_starts = kept.contiguous().numpy(), torch.empty_like(starts)
    bad, room, rows = kernels.plan_removal(
        packed,
        starts.numpy(),
        lengths.numpy(),
        np.array(new_lengths, np.int64),
        np.array(edges, np.int64),
        roomy,
        new_starts.numpy(),
    )
    return (None if bad < 0 else int(bad)), new_starts, int(room), int(rows)
