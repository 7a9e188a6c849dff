"""Attention over pages by Triton kernels: any dtype, biases and softcaps, many programs a segment.

Decode steps cut each segment into pieces of `SPLIT_TOKENS` entries, one program each, which a
second launch joins by their log-sum-exps (Flash-Decoding). Pieces begin at fixed places, so that
the bits of a segment depend neither on other segments nor on the width of the table. Passes of
more queries take one program per block of queries.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Float
from torch import Tensor

from larder.ops.pages import SegmentTables

SPLIT_TOKENS = 256
BLOCK = 64  # entries that a program reads at a time
MAX_BLOCK_NUMBERS = 1 << 14  # of BLOCK entries of a head
MIN_ROWS, MAX_ROWS = 16, 64  # queries of a program: what matrix units take, and what registers hold
# Triton's interpreter multiplies bfloat16 matrices as integers.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
SPLIT_ROWS = 64  # queries and heads up to which segments are cut


def paged_attention(
    queries: Float[Tensor, "S R Q D"],
    keys: Float[Tensor, "N P D"],
    values: Float[Tensor, "N P D"],
    tables: SegmentTables,
    scaling: float,
    bias: Float[Tensor, "N P"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "S R Q D"], Float[Tensor, "S R Q"]]:
    """Attention of every query over all entries of its segment; see `ops.paged_attention`.

    The output has the dtype of the queries.
    """
    queries = queries.contiguous()
    segments, group_len, query_len, head_dim = queries.shape
    page_tokens, rows = keys.shape[1], group_len * query_len
    room = tables.table.shape[1] * page_tokens
    is_cut = rows <= SPLIT_ROWS
    split_tokens = SPLIT_TOKENS if is_cut else room
    splits = triton.cdiv(room, split_tokens)
    padded = max(MIN_ROWS, triton.next_power_of_2(head_dim))
    block = min(BLOCK, page_tokens, max(16, MAX_BLOCK_NUMBERS // padded))
    row_block = min(MAX_ROWS, max(MIN_ROWS, triton.next_power_of_2(rows)))
    out, lse = torch.empty_like(queries), queries.new_empty(queries.shape[:3], dtype=torch.float32)
    parts, part_lse = out, lse
    if is_cut:
        parts = torch.empty(splits, *queries.shape, dtype=torch.float32, device=queries.device)
        part_lse = torch.empty(splits, *lse.shape, dtype=torch.float32, device=queries.device)
    sizes = {"P": page_tokens, "D": head_dim, "PADDED": padded, "SPLIT": split_tokens}
    _launch(
        _attend,
        (segments, splits, triton.cdiv(rows, row_block)),
        queries,
        keys,
        values,
        tables.table,
        tables.lengths,
        lse if bias is None else bias,
        parts,
        part_lse,
        tables.table.shape[1],
        rows,
        scaling,
        0.0 if softcap is None else softcap,
        ROWS=row_block,
        BLOCK=block,
        HAS_BIAS=bias is not None,
        HAS_SOFTCAP=softcap is not None,
        WIDEN=IS_INTERPRETED,
        **sizes,
    )
    if is_cut:
        _launch(
            _join,
            (segments, rows),
            parts,
            part_lse,
            tables.lengths,
            out,
            lse,
            D=head_dim,
            PADDED=padded,
            SPLIT=split_tokens,
        )
    return out, lse


def supports(page_tokens: int) -> bool:
    """True if the kernels take pages of this many entries."""
    return page_tokens >= MIN_ROWS and page_tokens & (page_tokens - 1) == 0


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **sizes: Any) -> None:
    """Launch a kernel; type checkers do not know what `triton.jit` makes of a function."""
    kernel[grid](*args, **sizes)


@triton.jit
def _attend(
    queries,
    keys,
    values,
    table,
    lengths,
    bias,
    out,
    lse,
    width,
    row_count,
    scaling,
    softcap,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    segment, split = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + segment)
    first = split * SPLIT
    if first >= length and split > 0:
        return
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    is_row, is_dim = rows < row_count, dims < D
    at = (segment * row_count + rows).to(tl.int64)
    mask = is_row[:, None] & is_dim[None, :]
    asked = tl.load(queries + at[:, None] * D + dims[None, :], mask=mask, other=0.0)
    if WIDEN:
        asked = asked.to(tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(first, tl.minimum(first + SPLIT, length), BLOCK):
        places = tl.arange(0, BLOCK)
        is_held = start + places < length
        page = tl.load(table + segment * width + start // P).to(tl.int64)
        stored = page * P + start % P + places
        offsets = stored[:, None] * D + dims[None, :]
        held = is_held[:, None] & is_dim[None, :]
        own = tl.load(keys + offsets, mask=held, other=0.0)
        if WIDEN:
            own = own.to(tl.float32)
        logits = tl.dot(asked, tl.trans(own), input_precision="ieee") * scaling
        if HAS_SOFTCAP:
            logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)  # tanh
        if HAS_BIAS:
            logits += tl.load(bias + stored, mask=is_held, other=0.0)[None, :]
        logits = tl.where(is_held[None, :], logits, float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf minus -inf would be NaN
        decay = tl.exp(peak - base)
        weights = tl.exp(logits - base[:, None])
        total = total * decay + tl.sum(weights, 1)
        own = tl.load(values + offsets, mask=held, other=0.0)
        if WIDEN:
            own = own.to(tl.float32)
        part = tl.dot(weights.to(own.dtype), own, input_precision="ieee")
        mixed = mixed * decay[:, None] + part
        peak = higher
    is_empty = total == 0.0
    mixed = mixed / tl.where(is_empty, 1.0, total)[:, None]
    at += split.to(tl.int64) * tl.num_programs(0) * row_count
    found = tl.where(is_empty, float("-inf"), peak + tl.log(tl.where(is_empty, 1.0, total)))
    tl.store(lse + at, found, mask=is_row)
    target = out + at[:, None] * D + dims[None, :]
    tl.store(target, mixed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _join(
    parts,
    part_lse,
    lengths,
    out,
    lse,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    segment, row = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, PADDED)
    is_dim = dims < D
    at = (segment * tl.num_programs(1) + row).to(tl.int64)
    stride = (tl.num_programs(0) * tl.num_programs(1)).to(tl.int64)
    length = tl.load(lengths + segment)
    peak = tl.load(part_lse + at)
    mixed = tl.load(parts + at * D + dims, mask=is_dim, other=0.0)
    total = tl.where(peak == float("-inf"), 0.0, 1.0)
    for split in range(1, tl.cdiv(length, SPLIT)):
        there = at + split * stride
        own = tl.load(part_lse + there)
        higher = tl.maximum(peak, own)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        decay, weight = tl.exp(peak - base), tl.exp(own - base)
        held = tl.load(parts + there * D + dims, mask=is_dim, other=0.0)
        mixed = mixed * decay + held * weight
        total = total * decay + weight
        peak = higher
    is_empty = total == 0.0
    safe = tl.where(is_empty, 1.0, total)
    tl.store(lse + at, tl.where(is_empty, float("-inf"), peak + tl.log(safe)))
    tl.store(out + at * D + dims, (mixed / safe).to(out.dtype.element_ty), mask=is_dim)
