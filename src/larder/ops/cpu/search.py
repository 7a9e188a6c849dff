"""Search of keys on a CPU: one pass over each head's storage, in parallel, without copies."""

from __future__ import annotations

from ctypes import byref

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from larder.ops.cpu.c_library import NearestCall, c_library
from larder.ops.cpu.decode_attention import (
    MAX_HEAD_DIM,
    SPAN_FLOATS,
    SUPPORTED_DTYPES,
    as_numpy,
    num_threads_for,
    query_rows,
)

MAX_NEAREST_ROWS = 4  # per kv head; above it a matrix product is faster


def supports(queries: Tensor, keys: Tensor) -> bool:
    """True for contiguous CPU storage of a supported dtype."""
    return (
        queries.device.type == "cpu"
        and keys.device.type == "cpu"
        and keys.dtype in SUPPORTED_DTYPES
        and keys.is_contiguous()
    )


def page_max_scores(
    queries: Float[Tensor, "H D"],
    keys: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    page: int,
) -> Float[Tensor, "H N"]:
    """Kernel of `page_max_scores`; thread-safe."""
    from larder.ops.cpu import search_kernels as kernels  # compiles: not before it is needed

    rows, owned = query_rows(queries[:, None], lengths.shape[0]), lengths.numpy()
    num_pages = -(-int(owned.max()) // page)
    bests = np.full((rows.shape[0], rows.shape[1], num_pages), -np.inf, np.float32)
    chunks = kernels.page_chunks(owned, page)
    threads = num_threads_for(int(owned.sum()) * rows.shape[1] * rows.shape[2])
    search = kernels.score_pages_parallel if threads > 1 else kernels.score_pages
    search(rows, as_numpy(keys.detach()), starts.numpy(), owned, page, chunks, bests)
    return torch.from_numpy(bests).view(queries.shape[0], num_pages)


def supports_ranking(numbers: Tensor) -> bool:
    """True for scores or ranks in host memory."""
    return numbers.device.type == "cpu"


def top_rows(scores: Float[Tensor, "F N"], count: int) -> Int64[Tensor, "F P"]:
    """Kernel of `top_rows`; thread-safe."""
    from larder.ops.cpu import search_kernels as kernels

    numbers = scores.detach().float().contiguous().numpy()
    best = np.full((len(numbers), min(count, numbers.shape[1])), -1, np.int64)
    threads = num_threads_for(numbers.size)
    choose = kernels.top_rows_parallel if threads > 1 else kernels.top_rows
    choose(numbers, best)
    return torch.from_numpy(best)


def interleaved(ranked: Int64[Tensor, "H P"], kv_heads: int, count: int) -> Int64[Tensor, "K L"]:
    """Kernel of `interleaved`; thread-safe."""
    from larder.ops.cpu import search_kernels as kernels

    lists = ranked.contiguous().numpy()
    group = len(lists) // kv_heads
    united = np.full((kv_heads, min(count, group * lists.shape[1])), -1, np.int64)
    kernels.interleave(lists, group, united)
    return torch.from_numpy(united)


def supports_nearest(rows: Tensor, num_queries: int, num_kv_heads: int) -> bool:
    """True for few rows over contiguous CPU storage of a supported dtype."""
    return (
        rows.device.type == "cpu"
        and rows.dtype in SUPPORTED_DTYPES
        and num_queries <= MAX_NEAREST_ROWS * num_kv_heads
        and rows.is_contiguous()
    )


def nearest_rows(
    rows: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    marked: Bool[Tensor, " T"],
    query_rows: Int64[Tensor, " F"],
) -> tuple[Float[Tensor, " F"], Int64[Tensor, " F"]]:
    """Kernel of `nearest_rows`; thread-safe."""
    library = c_library()
    if library is None or rows.shape[1] > MAX_HEAD_DIM:
        return numba_nearest_rows(rows, starts, lengths, marked, query_rows)
    starts, lengths, marked = starts.contiguous(), lengths.contiguous(), marked.contiguous()
    rows, query_rows = rows.detach(), query_rows.contiguous()
    cosines = torch.empty(len(query_rows), dtype=torch.float32)
    nearest = torch.empty(len(query_rows), dtype=torch.int64)
    call = NearestCall(
        rows=rows.data_ptr(),
        starts=starts.data_ptr(),
        lengths=lengths.data_ptr(),
        marked=marked.data_ptr(),
        query_rows=query_rows.data_ptr(),
        cosines=cosines.data_ptr(),
        nearest=nearest.data_ptr(),
        head_dim=rows.shape[1],
        item_bytes=rows.element_size(),
        count=len(query_rows),
    )
    work = 2 * len(query_rows) * len(marked) // len(lengths) * rows.shape[1] if len(lengths) else 0
    threads = min(torch.get_num_threads(), len(query_rows), work // SPAN_FLOATS)
    library.larder_nearest_rows(byref(call), threads)
    return cosines, nearest


def numba_nearest_rows(
    rows: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    marked: Bool[Tensor, " T"],
    query_rows: Int64[Tensor, " F"],
) -> tuple[Float[Tensor, " F"], Int64[Tensor, " F"]]:
    """`nearest_rows` where no C kernel was compiled, and for rows that are too long for it."""
    from larder.ops.cpu import search_kernels as kernels  # compiles: not before it is needed

    owned, marks = lengths.numpy(), marked.numpy()
    heads = np.searchsorted(np.cumsum(owned), query_rows.numpy(), side="right")
    cosines = np.empty(len(query_rows), np.float32)
    nearest = np.empty(len(query_rows), np.int64)
    threads = num_threads_for(2 * int(owned[heads].sum()) * rows.shape[1])
    search = (
        kernels.nearest_all_parallel if threads > 1 and len(query_rows) > 1 else kernels.nearest_all
    )
    search(
        as_numpy(rows.detach()),
        starts.numpy(),
        owned,
        marks,
        query_rows.numpy(),
        heads,
        cosines,
        nearest,
    )
    return torch.from_numpy(cosines), torch.from_numpy(nearest)
