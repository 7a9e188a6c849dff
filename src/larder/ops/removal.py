"""Removal of rows from ragged storage in place.

    before   [ a b c d e | slack | f g h | slack ]
    remove b, f and h
    after    [ a c d e | slack     | g | slack   ]

The kept rows of a head move within the head's own region: either the rows behind a removed entry
move up, or, if fewer lie before it, those move down and the head starts a row later. The CPU kernel
in `larder.ops.cpu.removal` is used for contiguous storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from larder.core.errors import CacheError
from larder.ops.cpu import removal

MIN_ROAMING_SLACK = 16  # rows of slack from which on a head may move within its region


def remove_rows(
    tensors: Sequence[Tensor],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    kept: Int64[Tensor, " kept"],
    new_lengths: tuple[int, ...],
    columns: Float[Tensor, "n C"] | None = None,
    new_starts: Int64[Tensor, " K"] | None = None,
) -> None:
    """Compact the kept rows of every head, in order and in place.

    Rows already in place are not touched; rows around the kept ones become slack with undefined
    content. A call that raises has changed nothing. One thread at a time may use a storage;
    different storages are safe from several threads.

    Args:
        tensors: of one storage: keys, values, positions and so on, of any type, [C, ...].
        starts, lengths: rows of the heads before the removal; int64 in host memory.
        kept: indices into the packed entries (head by head, without slack), ascending.
        new_lengths: number of kept entries of each head.
        columns: further numbers of the same rows, one tensor row per column.
        new_starts: first row of each head afterwards, in host memory; heads must not overlap. By
            default the present one.

    Raises:
        CacheError: the storages do not hold the heads, or `kept` does not fit them.
    """
    rows = () if columns is None else tuple(columns)
    storages = *tensors, *rows
    new_starts = starts if new_starts is None else new_starts
    _check_storages(storages, starts, lengths)
    _check_counts(lengths, kept, new_lengths)
    form = removal.remove_rows if removal.supports(storages) else reference_remove_rows
    bad = form(storages, starts, lengths, kept, new_lengths, new_starts)
    if bad is not None:
        raise _kept_error(bad, lengths)


def reference_remove_rows(
    storages: Sequence[Tensor],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    kept: Int64[Tensor, " kept"],
    new_lengths: tuple[int, ...],
    new_starts: Int64[Tensor, " K"],
) -> int | None:
    """Reference of `remove_rows` for every device, one head and storage at a time.

    Returns:
        The first head whose kept entries are invalid, or None.
    """
    offsets = (lengths.cumsum(0) - lengths).tolist()
    owned = list(zip(starts.tolist(), offsets, lengths.tolist(), strict=True))
    heads = kept.cpu().split(list(new_lengths))
    for h, (own, (_, offset, length)) in enumerate(zip(heads, owned, strict=True)):
        edges = torch.cat([own.new_tensor([offset - 1]), own, own.new_tensor([offset + length])])
        if not (edges.diff() > 0).all():
            return h
    indices = zip(heads, owned, new_starts.tolist(), strict=True)
    for own, (start, offset, _), new_start in indices:
        rows = own - offset + start
        targets = torch.arange(new_start, new_start + len(rows))
        moved = rows != targets
        for storage in storages:
            source, target = (part[moved].to(storage.device) for part in (rows, targets))
            storage[target] = storage[source]
    return None


@dataclass(frozen=True)
class RemovalPlan:
    """Layout of the kept rows after a removal.

    Args:
        starts: first row of each head, in host memory.
        room: least slack behind a head, in rows.
        rows: number of rows to move.
    """

    starts: Int64[Tensor, " K"]
    room: int
    rows: int


def plan_removal(
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    kept: Int64[Tensor, " kept"],
    new_lengths: tuple[int, ...],
    edges: tuple[int, ...],
    roomy: int,
) -> RemovalPlan:
    """Plan that moves either the front or the end of each head, whichever has fewer rows.

    Args:
        starts, lengths, kept, new_lengths: as for `remove_rows`; `kept` in host memory.
        edges: first row of the region of each head, and the end of the last region.
        roomy: least slack at which the front of a head may move.

    Raises:
        CacheError: `kept` does not fit the heads.
    """
    _check_counts(lengths, kept, new_lengths)
    bad, new_starts, room, rows = removal.plan_removal(
        starts, lengths, kept, new_lengths, edges, roomy
    )
    if bad is not None:
        raise _kept_error(bad, lengths)
    return RemovalPlan(new_starts, room, rows)


def move_rows(
    tensors: Sequence[Tensor],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    kept: Int64[Tensor, " kept"],
    new_lengths: tuple[int, ...],
    columns: Float[Tensor, "n C"],
    motion: RemovalPlan,
) -> None:
    """Carry out a plan made for the same heads and kept entries."""
    storages = *tensors, *columns
    if removal.supports(storages):
        removal.move_rows(storages, starts, lengths, kept, new_lengths, motion.starts, motion.rows)
    else:
        reference_remove_rows(storages, starts, lengths, kept, new_lengths, motion.starts)


def plan_removals(removals: Sequence[removal.RowRemoval], roomy: int) -> removal.RemovalTable:
    """Plans for several storages, which `RemovalTable.move` carries out in one call.

    Args:
        removals: of different storages, each as for `plan_removal`.

    Raises:
        CacheError: kept entries do not fit their heads; nothing has changed.
    """
    for own in removals:
        _check_counts(own.lengths, own.kept, own.new_lengths)
    table = removal.RemovalTable(removals, roomy)
    if table.invalid is not None:
        index, head = table.invalid
        raise _kept_error(head, removals[index].lengths)
    return table


def _kept_error(head: int, lengths: Int[Tensor, " K"]) -> CacheError:
    return CacheError(
        f"The kept entries of kv head {head} must ascend within the head's own "
        f"{int(lengths[head])} packed entries, but they do not: sort them, and count them in "
        "new_lengths head by head."
    )


def _check_storages(storages: Sequence[Tensor], starts: Tensor, lengths: Tensor) -> None:
    ends = zip(starts.tolist(), lengths.tolist(), strict=True)
    end = max((start + length for start, length in ends), default=0)
    for storage in storages:
        if len(storage) < end:
            raise CacheError(
                f"A storage of {len(storage)} rows cannot hold heads that end at row {end}: "
                "give tensors whose first dimension is that of the storage."
            )


def _check_counts(lengths: Tensor, kept: Tensor, new_lengths: tuple[int, ...]) -> None:
    if len(new_lengths) != len(lengths) or sum(new_lengths) != len(kept) or min(new_lengths) < 0:
        raise CacheError(
            f"new_lengths {new_lengths} must count the {len(kept)} kept entries of "
            f"{len(lengths)} kv heads, one count a head."
        )
