"""Attention over pages by Triton kernels: any dtype, biases and softcaps, many programs a segment.

Decode steps cut each segment into splits of `SPLIT_TOKENS` entries, one program each, which a
second launch joins by their log-sum-exps (Flash-Decoding). Splits begin at fixed indices, so that
the bits of a segment depend neither on other segments nor on the width of the table. Passes of
more queries take one program per block of queries.
"""

from __future__ import annotations

import os

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Float
from torch import Tensor

from larder.ops.gpu.launch import launch
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
    rows = queries.shape[1] * queries.shape[2]
    out, lse = torch.empty_like(queries), queries.new_empty(queries.shape[:3], dtype=torch.float32)
    room = tables.table.shape[1] * keys.shape[1]
    if rows > SPLIT_ROWS:
        _attend_splits(queries, keys, values, tables, scaling, bias, softcap, room, out, lse)
        return out, lse
    shape = triton.cdiv(room, SPLIT_TOKENS), *queries.shape
    parts = torch.empty(shape, dtype=torch.float32, device=queries.device)
    part_lse = torch.empty(shape[:-1], dtype=torch.float32, device=queries.device)
    given = queries, keys, values, tables, scaling, bias, softcap
    _attend_splits(*given, SPLIT_TOKENS, parts, part_lse)
    sizes = _dim_sizes(queries)
    grid = len(queries), rows
    launch(_join, grid, parts, part_lse, tables.lengths, out, lse, SPLIT=SPLIT_TOKENS, **sizes)
    return out, lse


def _attend_splits(
    queries: Float[Tensor, "S R Q D"],
    keys: Float[Tensor, "N P D"],
    values: Float[Tensor, "N P D"],
    tables: SegmentTables,
    scaling: float,
    bias: Float[Tensor, "N P"] | None,
    softcap: float | None,
    split_tokens: int,
    out: Float[Tensor, "*C S R Q D"],
    lse: Float[Tensor, "*C S R Q"],
) -> None:
    """Attention to each split of `split_tokens` entries of the segments; C splits, or one."""
    page_tokens, rows = keys.shape[1], queries.shape[1] * queries.shape[2]
    width = tables.table.shape[1]
    sizes = _dim_sizes(queries)
    row_block = min(MAX_ROWS, max(MIN_ROWS, triton.next_power_of_2(rows)))
    num_splits = triton.cdiv(width * page_tokens, split_tokens)
    launch(
        _attend,
        (len(queries), num_splits, triton.cdiv(rows, row_block)),
        queries,
        keys,
        values,
        tables.table,
        tables.lengths,
        lse if bias is None else bias,
        out,
        lse,
        width,
        rows,
        scaling,
        0.0 if softcap is None else softcap,
        ROWS=row_block,
        BLOCK=min(BLOCK, page_tokens, max(16, MAX_BLOCK_NUMBERS // sizes["PADDED"])),
        HAS_BIAS=bias is not None,
        HAS_SOFTCAP=softcap is not None,
        WIDEN=IS_INTERPRETED,
        P=page_tokens,
        SPLIT=split_tokens,
        **sizes,
    )


def _dim_sizes(queries: Tensor) -> dict[str, int]:
    """Sizes of the head dimension that the kernels are compiled for."""
    head_dim = queries.shape[-1]
    return {"D": head_dim, "PADDED": max(MIN_ROWS, triton.next_power_of_2(head_dim))}


def supports(page_tokens: int) -> bool:
    """True if the kernels take pages of this many entries."""
    return page_tokens >= MIN_ROWS and page_tokens & (page_tokens - 1) == 0


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
    head_queries = _loaded(queries + at[:, None] * D + dims[None, :], mask, WIDEN)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(first, tl.minimum(first + SPLIT, length), BLOCK):
        within = tl.arange(0, BLOCK)
        is_held = start + within < length
        page = tl.load(table + segment * width + start // P).to(tl.int64)
        stored = page * P + start % P + within
        offsets = stored[:, None] * D + dims[None, :]
        held = is_held[:, None] & is_dim[None, :]
        own = _loaded(keys + offsets, held, WIDEN)
        logits = tl.dot(head_queries, tl.trans(own), input_precision="ieee") * scaling
        logits = _modified(logits, bias + stored, is_held, softcap, HAS_BIAS, HAS_SOFTCAP)
        higher = tl.maximum(peak, tl.max(logits, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf minus -inf would be NaN
        decay, weights = tl.exp(peak - base), tl.exp(logits - base[:, None])
        total, peak = total * decay + tl.sum(weights, 1), higher
        own = _loaded(values + offsets, held, WIDEN)
        mixed = mixed * decay[:, None]
        mixed += tl.dot(weights.to(own.dtype), own, input_precision="ieee")
    at += split.to(tl.int64) * tl.num_programs(0) * row_count
    # Without entries the peak is -inf, and so is the log-sum-exp.
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(lse + at, peak + tl.log(total), mask=is_row)
    target = out + at[:, None] * D + dims[None, :]
    tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _loaded(pointers, mask, WIDEN: tl.constexpr):
    own = tl.load(pointers, mask=mask, other=0.0)
    return own.to(tl.float32) if WIDEN else own


@triton.jit
def _modified(logits, bias, is_held, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    if HAS_SOFTCAP:
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)  # tanh
    if HAS_BIAS:
        logits += tl.load(bias, mask=is_held, other=0.0)[None, :]
    return tl.where(is_held[None, :], logits, float("-inf"))


@triton.jit
def _join(
    parts, part_lse, lengths, out, lse, D: tl.constexpr, PADDED: tl.constexpr, SPLIT: tl.constexpr
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
