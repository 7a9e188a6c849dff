"""Triton kernels over pages: appending, gather, eviction gather and column statistics.

They have the signatures of `ops.pages`, whose torch forms are their readable twins. One program
handles a block of rows of one segment; the eviction gather one segment from front to back, because
it moves rows within their pages. Triton comes with CUDA builds of torch, or by `larder[triton]`.
"""

from __future__ import annotations

from typing import Any

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor

from larder.ops.column_statistics import GroupReduction
from larder.ops.gpu.launch import launch

BLOCK = 64  # rows of a program
REDUCTIONS = {GroupReduction.SUM: 0, GroupReduction.MEAN: 1, GroupReduction.MAX: 2}


def append_step(
    pools: tuple[Shaped[Tensor, "N P D"], Shaped[Tensor, "N P D"]],
    slots: Int64[Tensor, " S"],
    keys: Float[Tensor, "K B D"],
    values: Float[Tensor, "K B D"],
) -> None:
    """One entry of each head of each sequence; see `ops.pages.append_step`."""
    kv_heads, batch_len, head_dim = keys.shape
    strides = *keys.stride(), *values.stride()
    padded = triton.next_power_of_2(head_dim)
    grid = (kv_heads * batch_len,)
    launch(
        _append, grid, *pools, slots, keys, values, kv_heads, *strides, D=head_dim, PADDED=padded
    )


def gather_pages(
    pool: Shaped[Tensor, "N P D"],
    table: Int32[Tensor, "S W"],
    lengths: Int32[Tensor, " S"],
    starts: Int64[Tensor, " S"],
    total: int,
) -> Shaped[Tensor, "T D"]:
    """Entries of all segments end to end; see `ops.pages.gather_pages`."""
    out = pool.new_empty(total, pool.shape[2])
    grid = len(table), triton.cdiv(table.shape[1] * pool.shape[1], BLOCK)
    launch(_gather, grid, pool, table, lengths, starts, out, table.shape[1], **_sizes(pool))
    return out


def compact_pages(
    pool: Shaped[Tensor, "N P D"],
    sources: Int32[Tensor, "S W"],
    targets: Int32[Tensor, "S V"],
    kept: Int32[Tensor, "S M"],
    counts: Int32[Tensor, " S"],
) -> None:
    """Move kept entries to the front of their segments; see `ops.pages.compact_pages`."""
    widths = sources.shape[1], targets.shape[1], kept.shape[1]
    launch(_compact, (len(kept),), pool, sources, targets, kept, counts, *widths, **_sizes(pool))


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
    """Add attention weights to a column; see `ops.pages.add_column_mass`."""
    segments, group_len, query_len, _ = queries.shape
    grid = segments, triton.cdiv(table.shape[1] * keys.shape[1], BLOCK)
    launch(
        _column_mass,
        grid,
        columns,
        queries.contiguous(),
        keys,
        table,
        lengths,
        lse.contiguous(),
        columns if bias is None else bias,
        table.shape[1],
        query_len,
        scaling,
        0.0 if softcap is None else softcap,
        R=group_len,
        HAS_BIAS=bias is not None,
        HAS_SOFTCAP=softcap is not None,
        REDUCTION=REDUCTIONS[reduction],
        **_sizes(keys),
    )


def _sizes(pool: Tensor) -> dict[str, Any]:
    """Sizes that the kernels are compiled for."""
    page_tokens, head_dim = pool.shape[1:]
    padded = triton.next_power_of_2(head_dim)
    return {"P": page_tokens, "D": head_dim, "PADDED": padded, "BLOCK": BLOCK}


@triton.jit
def _append(
    key_pool,
    value_pool,
    slots,
    keys,
    values,
    kv_heads,
    key_head,
    key_row,
    key_dim,
    value_head,
    value_row,
    value_dim,
    D: tl.constexpr,
    PADDED: tl.constexpr,
):
    segment = tl.program_id(0)
    row, head = segment // kv_heads, segment % kv_heads
    slot = tl.load(slots + segment)
    dims = tl.arange(0, PADDED)
    mask = dims < D
    own = tl.load(keys + head * key_head + row * key_row + dims * key_dim, mask=mask)
    tl.store(key_pool + slot * D + dims, own, mask=mask)
    own = tl.load(values + head * value_head + row * value_row + dims * value_dim, mask=mask)
    tl.store(value_pool + slot * D + dims, own, mask=mask)


@triton.jit
def _gather(
    pool,
    table,
    lengths,
    starts,
    out,
    width,
    P: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    segment = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_held = offsets < tl.load(lengths + segment)
    pages = tl.load(table + segment * width + offsets // P, mask=is_held, other=0)
    rows = pages.to(tl.int64) * P + offsets % P
    dims = tl.arange(0, PADDED)[None, :]
    mask = is_held[:, None] & (dims < D)
    entries = tl.load(pool + rows[:, None] * D + dims, mask=mask)
    there = tl.load(starts + segment) + offsets
    tl.store(out + there[:, None] * D + dims, entries, mask=mask)


@triton.jit
def _compact(
    pool,
    sources,
    targets,
    kept,
    counts,
    source_width,
    target_width,
    kept_width,
    P: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    segment = tl.program_id(0)
    count = tl.load(counts + segment)
    dims = tl.arange(0, PADDED)[None, :]
    for first in range(0, count, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        is_kept = offsets < count
        origins = tl.load(kept + segment * kept_width + offsets, mask=is_kept, other=0)
        source_pages = sources + segment * source_width + origins // P
        target_pages = targets + segment * target_width + offsets // P
        rows = tl.load(source_pages, mask=is_kept, other=0).to(tl.int64) * P + origins % P
        there = tl.load(target_pages, mask=is_kept, other=0).to(tl.int64) * P + offsets % P
        mask = (is_kept & (rows != there))[:, None] & (dims < D)
        entries = tl.load(pool + rows[:, None] * D + dims, mask=mask)
        # All warps have read before one writes: within a block, the place of one kept entry may be
        # the origin of another. Origins of later blocks lie behind all targets of this one.
        tl.debug_barrier()
        tl.store(pool + there[:, None] * D + dims, entries, mask=mask)


@triton.jit
def _column_mass(
    columns,
    queries,
    keys,
    table,
    lengths,
    lse,
    bias,
    width,
    query_len,
    scaling,
    softcap,
    R: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    REDUCTION: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    segment = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_held = offsets < tl.load(lengths + segment)
    pages = tl.load(table + segment * width + offsets // P, mask=is_held, other=0)
    rows = pages.to(tl.int64) * P + offsets % P
    dims = tl.arange(0, PADDED)
    mask = is_held[:, None] & (dims[None, :] < D)
    own = tl.load(keys + rows[:, None] * D + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    joined = tl.zeros([BLOCK], tl.float32)
    for head in range(R):
        mass = tl.zeros([BLOCK], tl.float32)
        for query in range(query_len):
            index = (segment * R + head) * query_len + query
            query_row = tl.load(queries + index * D + dims, mask=dims < D, other=0.0).to(tl.float32)
            logits = tl.sum(own * query_row[None, :], 1) * scaling
            if HAS_SOFTCAP:
                logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)  # tanh
            if HAS_BIAS:
                logits += tl.load(bias + rows, mask=is_held, other=0.0)
            mass += tl.exp(logits - tl.load(lse + index))
        joined = tl.maximum(joined, mass) if REDUCTION == 2 else joined + mass
    if REDUCTION == 1:
        joined = joined / R
    before = tl.load(columns + rows, mask=is_held, other=0.0)
    tl.store(columns + rows, before + joined, mask=is_held)
