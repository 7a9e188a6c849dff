"""Row updates of a layer's storage: insert entries by position, relocate rows, write a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from larder.cache.merged_entries import MergedEntries
from larder.core.plan import Plan
from larder.core.types import empty_tensor
from larder.ops.packing import packed_rows, search_sorted, storage_rows

if TYPE_CHECKING:  # where entries are evicted
    from larder.ops.cpu.removal import RowRemoval

HEAD_STRIDE = 1 << 32  # positions of one head, in ranks by head and position


@dataclass(frozen=True)
class InsertedEntries:
    """Entries that come from another tier of the layer, ordered by head, then position.

    Args:
        heads: in host memory.
        columns: ledger columns, one number per entry [n, N].
    """

    heads: Int64[Tensor, " N"]
    keys: Float[Tensor, "N D"]
    values: Float[Tensor, "N D"]
    positions: Int32[Tensor, " N"]
    columns: Float[Tensor, "n N"]

    def __len__(self) -> int:
        return len(self.heads)

    def counts(self, kv_heads: int) -> Int64[Tensor, " K"]:
        """Entries of each kv head, in host memory."""
        return torch.bincount(self.heads, minlength=kv_heads)


def join_inserted(
    one: InsertedEntries | None, other: InsertedEntries | None
) -> InsertedEntries | None:
    """Entries of both, in order of heads and positions; None if there are none."""
    if one is None or other is None:
        return one or other
    heads = torch.cat([one.heads, other.heads])
    positions = torch.cat([one.positions, other.positions])
    order = (heads * HEAD_STRIDE + positions.cpu()).argsort()
    there = order.to(positions.device)
    return InsertedEntries(
        heads[order],
        torch.cat([one.keys, other.keys])[there],
        torch.cat([one.values, other.values])[there],
        positions[there],
        torch.cat([one.columns, other.columns], dim=1)[:, there],
    )


def append_runs(
    stored: Sequence[Tensor], firsts: Sequence[int], fresh: Sequence[Tensor]
) -> Iterator[slice]:
    """Append many entries to each head, from its first row on, without a copy between.

    Args:
        stored: storage of keys, values and positions, one row an entry.
        fresh: what is appended to each, one run of rows a head.

    Yields:
        The rows of each head, once they are written.
    """
    for head, first in enumerate(firsts):
        rows = slice(first, first + fresh[0].shape[1])
        for storage, runs in zip(stored, fresh, strict=True):
            storage[rows] = runs[head]
        yield rows


def insert_entries(
    stored: Sequence[Tensor],
    columns: Float[Tensor, "n C"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
    inserted: InsertedEntries,
) -> None:
    """Insert entries into their heads by position; each head has enough slack behind it.

    Args:
        stored: keys, values and positions, one row per row of the storage.
        starts, lengths: of the heads before the insertion.
    """
    keys, values, positions = stored
    counts = inserted.counts(len(starts)).tolist()
    first = 0
    for start, length, count in zip(starts.tolist(), lengths.tolist(), counts, strict=True):
        span, first = slice(first, first + count), first + count
        if not count:
            continue
        held = positions[start : start + length]
        moved = int(torch.searchsorted(held, inserted.positions[span][:1])[0])  # all before stay
        rows = slice(start + moved, start + length + count)
        order = torch.cat([held[moved:], inserted.positions[span]]).argsort()
        pairs = (keys, inserted.keys), (values, inserted.values), (positions, inserted.positions)
        for into, new in pairs:
            there = into[start + moved : start + length]
            into[rows] = torch.cat([there, new[span].to(into.dtype)])[order]
        there = columns[:, start + moved : start + length]
        columns[:, rows] = torch.cat([there, inserted.columns[:, span]], dim=1)[:, order]


@dataclass(frozen=True)
class PlanWrites:
    """Values that a plan writes into kept entries after these have moved.

    Args:
        targets: storage rows that get `keys` and `values`.
        rows: storage rows of all entries, which get `columns`; empty if no column is written.
    """

    targets: Int64[Tensor, " N"]
    keys: Float[Tensor, "N D"]
    values: Float[Tensor, "N Dv"]
    rows: Int64[Tensor, " _"]
    columns: Mapping[str, Float[Tensor, " T"]]
    scalars: Mapping[str, Float[Tensor, " K"]]


@dataclass(frozen=True)
class PlannedEviction:
    """Eviction from one layer's storage, ready for a call for several layers.

    Args:
        sums: merged entries of the plan.
        removal: the rows that stay.
    """

    plan: Plan
    sums: MergedEntries
    removal: RowRemoval


def plan_writes(
    plan: Plan,
    sums: MergedEntries,
    layout: tuple[Int64[Tensor, " K"], Int64[Tensor, " K"]],
    like: Float[Tensor, "C D"],
    numbers: Float[Tensor, "n C"],
) -> PlanWrites:
    """Writes of a plan, computed before any entry moves.

    Args:
        layout: starts and lengths of the kept entries after the plan.
        like: the layer's keys, for dtype and device.
        numbers: the layer's ledger columns, likewise.
    """
    starts, lengths = layout
    targets = empty_tensor(torch.int64, 0)
    rows = packed_rows(starts, lengths) if plan.columns else targets
    if len(sums.targets):
        indices = search_sorted(sums.targets.cpu(), plan.kept.cpu())
        targets = storage_rows(indices, starts, lengths)
    return PlanWrites(
        targets.to(like.device),
        sums.keys.to(like.dtype),
        sums.values.to(like.dtype),
        rows.to(like.device),
        {name: column.to(numbers) for name, column in plan.columns.items()},
        {name: scalars.to(numbers) for name, scalars in plan.scalars.items()},
    )


def relocate_rows(
    stored: Sequence[Tensor],
    columns: Float[Tensor, "n C"],
    rows: Sequence[Int64[Tensor, " _"]],
    starts: Int64[Tensor, " K"],
    size: int,
) -> list[Tensor]:
    """The given rows of each head in new storage of `size` rows; columns come last.

    Args:
        stored: keys, values unless they are the keys, and positions, one row per row of the
            storage.
        starts: first new row of each head; slack between heads is uninitialized.
    """
    *sides, positions = stored
    fresh = [side.new_empty(size, side.shape[1]) for side in sides]
    fresh.append(torch.zeros(size, dtype=torch.int32, device=positions.device))
    numbers = columns.new_zeros(len(columns), size)
    for part, start in zip(rows, starts.tolist(), strict=True):
        part, there = part.to(positions.device), slice(start, start + len(part))
        for old, new in zip(stored, fresh, strict=True):
            torch.index_select(old, 0, part, out=new[there])
        numbers[:, there] = columns[:, part]
    return [*fresh, numbers]
