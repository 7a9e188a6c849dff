"""Pages of entries in one pool: append, gather, eviction and column statistics.

    pool     [N, P, ...]   N pages of P rows; page 0 is the null page, whose content is undefined
    table    [S, W]        int32, pages of each segment in order, 0 behind its last one
    lengths  [S]           int32, entries of each segment

A segment is one kv head of one sequence, so that heads have lengths of their own. Tables and
lengths are on the device of the pool, and no form synchronizes with the host. On a GPU with Triton
the kernels of `ops.gpu.page_kernels` run; elsewhere torch, which is their readable twin.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor

from larder.ops.column_statistics import GroupReduction


class SegmentTables(NamedTuple):
    """Layout of some segments over the pages of one layer, on the device of the pages.

    Args:
        table: pages of each segment, in order, 0 behind its last one.
        lengths: entries of each segment.
        query_offsets: s * Q, and key_offsets: s * W * P, for each s up to S.
    """

    table: Int32[Tensor, "S W"]
    lengths: Int32[Tensor, " S"]
    query_offsets: Int32[Tensor, " S1"]
    key_offsets: Int32[Tensor, " S1"]


class PagedEntries(NamedTuple):
    """Storage of the pages of a layer; a row of each belongs to one entry."""

    keys: Float[Tensor, "N P D"]
    values: Float[Tensor, "N P D"]
    positions: Int32[Tensor, "N P"]
    columns: Float[Tensor, "n N P"]


class EvictionLimits(NamedTuple):
    """Entries of each segment that stay.

    Args:
        lengths: entries of the segment, its new one included; at most one more than `counts`.
        counts: entries that stay.
        firsts, stops: entries at true positions before the first or from the second on stay.
    """

    lengths: Int32[Tensor, " S"]
    counts: Int32[Tensor, " S"]
    firsts: Int32[Tensor, " S"]
    stops: Int32[Tensor, " S"]


class EntryMerging(NamedTuple):
    """Merging of rejected entries into the most similar one that stays, above a threshold.

    Args:
        rates: how fast the threshold of a segment follows the likeness of what is rejected; 0 for
            segments that drop what they reject.
        slack: distance below the threshold at which an entry is still merged.
        thresholds: threshold of each segment, at its first page; NaN before the first.
        newest: true position of the newest token of each segment.
        log_counts: column with the logarithm of the number of entries that an entry stands for.
    """

    rates: Float[Tensor, " S"]
    slack: float
    thresholds: Float[Tensor, " N"]
    newest: Int32[Tensor, " S"]
    log_counts: Float[Tensor, "N P"]


def append_rows(
    pool: Shaped[Tensor, "N P *rest"], slots: Int64[Tensor, " M"], rows: Shaped[Tensor, "M *rest"]
) -> None:
    """Write rows of new entries into their slots, rows of the pool without repeats."""
    pool.flatten(0, 1).index_copy_(0, slots, rows)


def append_step(
    pools: tuple[Shaped[Tensor, "N P D"], Shaped[Tensor, "N P D"]],
    slots: Int64[Tensor, " S"],
    keys: Float[Tensor, "K B D"],
    values: Float[Tensor, "K B D"],
) -> None:
    """Write one key and value of each head of each sequence; segment b * K + k is head k of b."""
    if (kernels := _kernels(pools[0])) is not None:
        return kernels.append_step(pools, slots, keys, values)
    for pool, rows in zip(pools, (keys, values), strict=True):
        append_rows(pool, slots, rows.transpose(0, 1).flatten(0, 1))


def pool_rows(
    table: Int32[Tensor, "S W"], indices: Int32[Tensor, "S M"], page_tokens: int
) -> Int64[Tensor, "S M"]:
    """Pool row of the entries at some indices of their segment, 0 the oldest."""
    pages = table.gather(1, torch.div(indices, page_tokens, rounding_mode="floor").long())
    return (pages * page_tokens + indices.remainder(page_tokens)).long()


def gather_pages(
    pool: Shaped[Tensor, "N P D"],
    table: Int32[Tensor, "S W"],
    lengths: Int32[Tensor, " S"],
    starts: Int64[Tensor, " S"],
    total: int,
) -> Shaped[Tensor, "T D"]:
    """Entries of all segments end to end, in a new tensor.

    Args:
        starts: packed index of the first entry of each segment.
        total: T, the sum of the lengths.
    """
    if (kernels := _kernels(pool)) is not None:
        return kernels.gather_pages(pool, table, lengths, starts, total)
    packed = torch.arange(total, device=pool.device)
    segments = torch.searchsorted(starts + lengths, packed, right=True)
    indices = packed - starts[segments]
    pages = table[segments, torch.div(indices, pool.shape[1], rounding_mode="floor")]
    return pool.flatten(0, 1)[pages.long() * pool.shape[1] + indices.remainder(pool.shape[1])]


def compact_pages(
    pool: Shaped[Tensor, "N P D"],
    sources: Int32[Tensor, "S W"],
    targets: Int32[Tensor, "S V"],
    kept: Int32[Tensor, "S M"],
    counts: Int32[Tensor, " S"],
) -> None:
    """Eviction gather: move the kept entries of each segment to its first rows, in order.

    Args:
        sources: pages of the segments so far.
        targets: pages afterwards: the same, or pages that no segment reads.
        kept: indices of the kept entries, ascending; anything in range behind the first `counts`.
        counts: entries kept in each segment.
    """
    if (kernels := _kernels(pool)) is not None:
        return kernels.compact_pages(pool, sources, targets, kept, counts)
    rows, page_tokens = pool.flatten(0, 1), pool.shape[1]
    indices = torch.arange(kept.shape[1], dtype=torch.int32, device=pool.device).expand_as(kept)
    is_kept = indices < counts.unsqueeze(1)
    there = pool_rows(targets, indices.clamp(max=targets.shape[1] * page_tokens - 1), page_tokens)
    moved = rows[pool_rows(sources, kept, page_tokens).flatten()]
    rows.index_copy_(0, torch.where(is_kept, there, 0).flatten(), moved)  # row 0: null page


def add_column_mass(
    columns: Float[Tensor, "N P"],
    queries: Float[Tensor, "S R Q D"],
    keys: Float[Tensor, "N P D"],
    table: Int32[Tensor, "S W"],
    lengths: Int32[Tensor, " S"],
    lse: Float[Tensor, "S R Q"],
    scaling: float,
    reduction: GroupReduction = GroupReduction.MEAN,
    bias: Float[Tensor, "N P"] | None = None,
    softcap: float | None = None,
) -> None:
    """Add to each entry its attention weights, summed over queries and reduced over query heads.

    Args:
        columns: float32 column of the pool, changed in place.
        lse: log-sum-exp of each query over the entries of its segment, as attention returns it.
        bias, softcap: as in attention.
    """
    if (kernels := _kernels(keys)) is not None:
        sizes = scaling, reduction, bias, softcap
        return kernels.add_column_mass(columns, queries, keys, table, lengths, lse, *sizes)
    rows, is_held = padded_rows(table, lengths, keys.shape[1])
    logits = queries.float() @ keys.flatten(0, 1)[rows].float()[:, None].mT * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.flatten()[rows][:, None, None]
    weights = (logits - lse.unsqueeze(-1)).exp()  # [S, R, Q, W * P]
    mass = weights.masked_fill(~is_held[:, None, None], 0.0).sum(2)
    joined = torch.stack([reduction.join(heads) for heads in mass.unbind()])
    columns.view(-1).index_add_(0, rows.flatten(), joined.flatten())


def padded_rows(
    table: Int32[Tensor, "S W"], lengths: Int32[Tensor, " S"], page_tokens: int
) -> tuple[Int64[Tensor, "S T"], Shaped[Tensor, "S T"]]:
    """Pool rows of whole tables, T = W * P, and the mask of those that hold entries."""
    indices = torch.arange(table.shape[1] * page_tokens, dtype=torch.int32, device=table.device)
    offsets = torch.arange(page_tokens, device=table.device)
    rows = table.long().unsqueeze(2) * page_tokens + offsets
    return rows.flatten(1), indices < lengths.unsqueeze(1)


def _kernels(pool: Tensor) -> ModuleType | None:
    """Triton's kernels where the pool is on a GPU and Triton is installed; else None."""
    return _page_kernels() if pool.device.type == "cuda" else None


@cache
def _page_kernels() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from larder.ops.gpu import page_kernels

    return page_kernels
