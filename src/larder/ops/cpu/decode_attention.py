"""Decode attention on a CPU: few queries over a long ragged cache, at the speed of memory.

Tri Dao, Daniel Haziza, Francisco Massa, Grigory Sizov, "Flash-Decoding for long-context inference"
(2023), https://crfm.stanford.edu/2023/10/12/flashdecoding.html: the cache is cut into spans that
are attended apart and merged by log-sum-exp. What differs: the spans are cut over the packed
entries of all heads together, one per thread, so that few or unequal heads still keep every core
busy; bfloat16 storage is widened block by block inside the kernel, never as a whole.
"""

from __future__ import annotations

import os
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)
MAX_QUERY_ROWS = 16  # query rows per kv head; from there on a matrix product is faster
SPAN_FLOATS = 1 << 15  # a thread that is woken for less than this costs more than it saves
THREADSAFE_LAYERS = (
    "omp",
    "tbb",
)  # numba's own "workqueue" aborts when two Python threads meet in it

_launch_lock = Lock()


def supports(queries: Tensor, keys: Tensor, values: Tensor, num_kv_heads: int) -> bool:
    """Whether the kernel takes this call: few query rows over contiguous CPU storage."""
    return (
        keys.device.type == "cpu"
        and keys.dtype in SUPPORTED_DTYPES
        and values.dtype == keys.dtype
        and queries.shape[0] // num_kv_heads * queries.shape[1] <= MAX_QUERY_ROWS
        and keys.is_contiguous()
        and values.is_contiguous()
    )


def decode_attention(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "C D"],
    values: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    scaling: float,
    bias: Float[Tensor, " C"] | None = None,
    logits: Float[Tensor, "N C"] | None = None,
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """Attend a few queries to all entries of their kv head. Safe from several threads at once."""
    from larder.ops.cpu import (
        decode_attention_kernels as kernels,  # compiles: not before it is needed
    )

    num_heads, query_len, head_dim = queries.shape
    rows = query_rows(queries, lengths.shape[0])
    owned = lengths.numpy()
    bounds = _split_bounds(int(owned.sum()), rows.shape[1] * head_dim)
    attend = kernels.attend_in_parallel if bounds.size > 2 else kernels.attend_serially
    stored = as_numpy(keys), as_numpy(values), bias_array(bias)
    noted = np.empty((0, 0), np.float32) if logits is None else logits.numpy()
    outs, lses = attend(rows, *stored, noted, starts.numpy(), owned, np.float32(scaling), bounds)
    out = torch.from_numpy(outs).view(num_heads, query_len, head_dim)
    return out, torch.from_numpy(lses).view(num_heads, query_len)


def query_rows(queries: Float[Tensor, "H Q D"], num_kv_heads: int) -> np.ndarray[Any, Any]:
    """Float32 rows [K, R * Q, D]: to a kernel, query heads and queries are the same."""
    rows = queries.float().reshape(num_kv_heads, -1, queries.shape[-1])
    return rows.contiguous().numpy()


def bias_array(bias: Float[Tensor, " C"] | None) -> np.ndarray[Any, Any]:
    """What kernels add to the logits; an empty array, where nothing is to be added."""
    if bias is None:
        return np.empty(0, np.float32)
    return bias.float().contiguous().numpy()


def as_numpy(stored: Tensor) -> np.ndarray[Any, Any]:
    """Stored rows as numpy's; it has no bfloat16, so there its bits, shared, not copied."""
    if stored.dtype is torch.bfloat16:
        return stored.view(torch.uint16).numpy()
    return stored.numpy()


def num_threads_for(floats: int) -> int:
    """How many threads shall share work that reads or multiplies this many floats; at least 1."""
    threads = min(torch.get_num_threads(), floats // SPAN_FLOATS)
    return max(min(threads, _num_threads()), 1) if threads > 1 else 1


def _split_bounds(total: int, floats_per_entry: int) -> np.ndarray[Any, Any]:
    """Equal spans over the packed entries, as many as threads are worth waking."""
    spans = num_threads_for(total * floats_per_entry)
    return np.array([total * s // spans for s in range(spans + 1)], np.int64)


def _num_threads() -> int:
    """Threads that numba offers this process, or 1 where starting them is not safe.

    A child forked after the launch has none: GNU OpenMP aborts there.
    """
    with _launch_lock:
        launched_in, num_threads = _start_numba_threads()
    return num_threads if launched_in == os.getpid() else 1


@cache
def _start_numba_threads() -> tuple[int, int]:
    """Start numba's threads once. Their OpenMP resets torch's thread count, which is put back."""
    from numba.np.ufunc.parallel import get_num_threads, threading_layer

    torch_threads = torch.get_num_threads()
    num_threads = get_num_threads()  # launches
    torch.set_num_threads(torch_threads)
    return os.getpid(), num_threads if threading_layer() in THREADSAFE_LAYERS else 1
