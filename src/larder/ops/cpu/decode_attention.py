"""Decode attention on a CPU: few queries over a long ragged cache, limited by memory bandwidth.

Tri Dao, Daniel Haziza, Francisco Massa, Grigory Sizov, "Flash-Decoding for long-context inference"
(2023), https://crfm.stanford.edu/2023/10/12/flashdecoding.html: the cache is cut into spans that
are processed separately and merged by log-sum-exp. What differs: spans are cut within each head, at
a fixed length, and shared among the threads, so that few or unequal heads still use every core;
bfloat16 storage is widened block by block inside the kernel, never as a whole. The kernel is
compiled from C; where it was not, numba compiles one whose spans cover the packed entries of all
heads together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from ctypes import addressof, byref
from functools import cache
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from larder.core.plan import StepColumn
from larder.ops.cpu.c_library import INTEGER, POINTER, AttentionCall, EvictionCall, c_library

if TYPE_CHECKING:  # few policies code entries
    from larder.ops.cpu.transform_attention import CodedEntriesCall

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)
MAX_QUERY_ROWS = 16  # query rows per kv head; from there on a matrix product is faster
MAX_HEAD_DIM = 1024  # of the C kernel
SPAN_FLOATS = 1 << 15  # least work per thread; for less, waking it costs more than it saves
SEGMENT_BYTES = 5 * 8  # of `struct segment` of c/decode_attention.h
THREADSAFE_LAYERS = ("omp", "tbb")  # numba's "workqueue" aborts under two Python threads

# Fields of `struct step_row` of c/decode_attention.h, 8 bytes each.
STEP_ROW = (
    *("keys", "values", "positions", "columns", "bias", "logits", "starts", "lengths"),
    *("new_keys", "new_values", "keys_stride", "values_stride"),
    *("num_columns", "stored_rows", "position", "segments", "num_segments"),
)

NO_CALLS = np.empty(0, np.int64)

_launch_lock = Lock()


def supports(queries: Tensor, keys: Tensor, values: Tensor, num_kv_heads: int) -> bool:
    """True for few query rows over contiguous CPU storage of a supported dtype."""
    return (
        queries.device.type == keys.device.type == "cpu"
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
    """Kernel of `ragged_attention` for a few queries; thread-safe.

    A head's result depends on its own entries alone, on any number of threads, where the C kernel
    was compiled.
    """
    library = c_library()
    if library is None or queries.shape[-1] > MAX_HEAD_DIM:
        return numba_decode_attention(queries, keys, values, starts, lengths, scaling, bias, logits)
    given = queries.float().contiguous()
    starts, lengths = starts.contiguous(), lengths.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    out, lse = torch.empty_like(given), given.new_empty(queries.shape[:2])
    own = AttendedRows(keys, values, starts, lengths, bias, logits)
    call = attention_call(given, own, int(lengths.sum()), scaling, (out, lse))
    if library.larder_decode_attention(byref(call)):
        raise MemoryError("Attention over the cache could not allocate its buffers.")
    return out, lse


def attention_call(
    queries: Float[Tensor, "H Q D"],
    rows: AttendedRows,
    num_entries: int,
    scaling: float,
    state: tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]],
) -> AttentionCall:
    """Call of the C kernel; it has addresses of the tensors, which the caller keeps.

    Args:
        queries: float32 and contiguous, as is what `rows` holds but for keys, values and layout.
        num_entries: about so many; they decide on the number of threads.
        state: output and log-sum-exp, which the call writes.
    """
    num_kv_heads, logits = rows.lengths.shape[0], rows.logits
    group_len = queries.shape[0] // num_kv_heads * queries.shape[1]
    floats = num_entries * group_len * queries.shape[2]
    return AttentionCall(
        queries=queries.data_ptr(),
        keys=rows.keys.data_ptr(),
        values=rows.values.data_ptr(),
        bias=None if rows.bias is None else rows.bias.data_ptr(),
        logits=None if logits is None else logits.data_ptr(),
        starts=rows.starts.data_ptr(),
        lengths=rows.lengths.data_ptr(),
        outs=state[0].data_ptr(),
        lses=state[1].data_ptr(),
        heads=num_kv_heads,
        num_queries=group_len,
        head_dim=queries.shape[2],
        item_bytes=rows.keys.element_size(),
        logits_stride=0 if logits is None else logits.stride(0),
        scaling=scaling,
        threads=min(torch.get_num_threads(), floats // SPAN_FLOATS + 1),
    )


class AttendedRows(NamedTuple):
    """Entries that `decode_attention` attends to; its arguments."""

    keys: Float[Tensor, "C D"]
    values: Float[Tensor, "C D"]
    starts: Int[Tensor, " K"]
    lengths: Int[Tensor, " K"]
    bias: Float[Tensor, " C"] | None = None
    logits: Float[Tensor, "N C"] | None = None


class StepSegment(NamedTuple):
    """Entries in other storage, which is only read, that come before those of a `StepStorage`.

    Args:
        bias: as in `ragged_attention`.
    """

    keys: Float[Tensor, "C D"]
    values: Float[Tensor, "C D"]
    starts: Int[Tensor, " K"]
    lengths: Int[Tensor, " K"]
    bias: Float[Tensor, " C"] | None


class StepStorage(NamedTuple):
    """Storage of one layer of one sequence, with room behind each kv head for one more entry.

    Args:
        positions: true positions of the stored rows; None where the caller writes them.
        columns: numbers of each stored row, 0 for a new entry.
        bias, logits: as in `ragged_attention`; no logits beside segments.
        segments: entries that come before those of the storage, in order.
        coded: further entries, as transform components.
    """

    keys: Float[Tensor, "C D"]
    values: Float[Tensor, "C D"]
    positions: Int[Tensor, " C"] | None
    columns: Float[Tensor, "n C"]
    starts: Int[Tensor, " K"]
    lengths: Int[Tensor, " K"]
    bias: Float[Tensor, " C"] | None
    logits: Float[Tensor, "R C"] | None
    segments: tuple[StepSegment, ...] = ()
    coded: CodedEntriesCall | None = None


class EvictionStorage(NamedTuple):
    """Storage of one layer of one sequence, and what is to be evicted from it.

    Args:
        starts, lengths: rows of each head; changed by the call.
        edges: first row of the region of each head, and the end of the last region.
        columns: numbers of each stored row.
        updated: index of each column that attention updates.
        joined: index of the column with the weights of values that joined an entry; None where
            values are not spread.
        log_counts: index of the column with counts of merged entries; None to drop entries.
        thresholds: thresholds of merging; changed by the call.
        logits: attention logits of the new token, of the query heads of each group; None where
            neither scores nor columns need them.
        count: entries that each head keeps; None to evict nothing.
        first, stop: positions outside [first, stop) are spared.
    """

    keys: Float[Tensor, "C D"]
    values: Float[Tensor, "C D"]
    positions: Int[Tensor, " C"]
    starts: Int[Tensor, " K"]
    lengths: Int[Tensor, " K"]
    edges: tuple[int, ...]
    columns: Float[Tensor, "n C"]
    updated: Mapping[StepColumn, int]
    joined: int | None
    log_counts: int | None
    thresholds: Float[Tensor, " K"] | None
    logits: Float[Tensor, "R C"] | None
    count: int | None = None
    first: int = 0
    stop: int = 0


# New keys and values of one layer [K, N, D], and the storages that they are appended to.
StepLayer = tuple[Tensor, Tensor, Sequence[StepStorage]]


def supports_step(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """True if `StepWork` takes new tokens of these shapes, dtype and device."""
    return (
        queries.device.type == keys.device.type == "cpu"
        and keys.dtype in SUPPORTED_DTYPES
        and values.dtype == keys.dtype
        and queries.shape[0] // keys.shape[0] <= MAX_QUERY_ROWS
        and queries.shape[-1] == values.shape[-1]
        and queries.shape[-1] <= MAX_HEAD_DIM
        and c_library() is not None
        and not (torch.is_grad_enabled() and queries.requires_grad)
    )


class EvictionRows(NamedTuple):
    """Evictions behind the attention of each layer of a decode step, as C kernels take them.

    Args:
        call: what they share.
        layers: addresses of `struct evicted` by layer and sequence, 0 where nothing is evicted.
        columns: addresses of `struct step_columns`, as `layers`; empty where attention alone is
            accumulated.
    """

    call: EvictionCall
    layers: NDArray[np.int64]
    columns: NDArray[np.int64]


class StepTable(NamedTuple):
    """Storages of one token of several sequences in one layer or more, as C kernels take them.

    Args:
        rows: fields of `struct step_row` of c/decode_attention.h, by layer and sequence.
        segments: fields of the `struct segment`s that they point to.
        stored_rows: rows of the storages of each layer together.
        coded: addresses of the calls for coded entries, as `rows`, 0 where there are none; empty
            where no storage has any.
        evictions: carried out behind the attention of each layer; None to count and evict later.
    """

    rows: NDArray[np.int64]
    segments: NDArray[np.int64]
    stored_rows: list[int]
    coded: NDArray[np.int64]
    evictions: EvictionRows | None = None

    @staticmethod
    def of(layers: Sequence[StepLayer], positions: Sequence[int]) -> StepTable:
        """Table of layers, for tokens at some positions."""
        held = [[each for own in storages for each in own.segments] for *_, storages in layers]
        segments = np.array([_segment_fields(each) for own in held for each in own], np.int64)
        rows, address = list[tuple[int, ...]](), segments.ctypes.data
        stored = list[int]()
        for (keys, values, storages), own in zip(layers, held, strict=True):
            rows += _step_rows(keys, values, positions, storages, address)
            stored.append(sum(each.keys.shape[0] for each in (*storages, *own)))
            address += len(own) * SEGMENT_BYTES
        calls = [own.coded for *_, storages in layers for own in storages]
        return StepTable(np.array(rows, np.int64), segments, stored, _addresses(calls))

    @staticmethod
    def of_layers(
        storages: Sequence[Sequence[StepStorage]],
        positions: Sequence[int],
        keys: Float[Tensor, "L K N D"],
        values: Float[Tensor, "L K N D"],
    ) -> StepTable:
        """Table of storages by layer and row, for tokens at some positions."""
        sides = zip(keys.unbind(), values.unbind(), storages, strict=True)
        return StepTable.of(list(sides), positions)

    @staticmethod
    def of_rows(
        rows: NDArray[np.int64],
        positions: Sequence[int],
        evictions: EvictionRows | None,
        keys: Float[Tensor, "L K N D"],
        values: Float[Tensor, "L K N D"],
    ) -> StepTable:
        """Table of storages whose fields [L, N, 17] are known, of new keys and values of layers."""
        layers, batch = np.arange(len(rows))[:, None], np.arange(rows.shape[1])
        for name, side in (("keys", keys), ("values", values)):
            layer, head, row = (stride * side.itemsize for stride in side.stride()[:3])
            rows[:, :, STEP_ROW.index(f"new_{name}")] = (
                side.data_ptr() + layers * layer + batch * row
            )
            rows[:, :, STEP_ROW.index(f"{name}_stride")] = head
        rows[:, :, STEP_ROW.index("position")] = positions
        stored = rows[:, :, STEP_ROW.index("stored_rows")].sum(1).tolist()
        return StepTable(rows, rows[:0], stored, NO_CALLS, evictions)

    def num_threads(self, floats_per_row: int) -> int:
        """Number of threads for attention to the longest layer."""
        floats = max(self.stored_rows) * floats_per_row
        return min(torch.get_num_threads(), floats // SPAN_FLOATS + 1)


def fixed_rows(storages: Sequence[StepStorage]) -> NDArray[np.int64]:
    """Fields [L, 17] of storages without segments, of no new entries yet."""
    nothing = torch.empty(0, 0, 0)
    rows = [_step_rows(nothing, nothing, (0,), (own,), 0)[0] for own in storages]
    return np.array(rows, np.int64)


def can_count() -> bool:
    """True if the library counts entries in place; one of an older version does not."""
    return hasattr(c_library(), "larder_count_entries")


def count_steps(rows: NDArray[np.int64], kv_heads: int) -> None:
    """Count the entries that a step has written behind the rows of storages."""
    library = c_library()
    assert library is not None
    sizes = INTEGER(len(rows)), INTEGER(kv_heads)
    library.larder_count_steps(POINTER(rows.ctypes.data), *sizes)


def count_entries(rows: NDArray[np.int64], kv_heads: int) -> list[int]:
    """Entries of each row of storages, over all heads."""
    library = c_library()
    assert library is not None
    counts = np.empty(len(rows), np.int64)
    sizes = INTEGER(len(rows)), INTEGER(kv_heads)
    library.larder_count_entries(POINTER(rows.ctypes.data), *sizes, POINTER(counts.ctypes.data))
    return counts.tolist()


def _addresses(calls: Sequence[CodedEntriesCall | None]) -> NDArray[np.int64]:
    """Addresses of calls, 0 for None; empty if there is none."""
    if not any(calls):
        return NO_CALLS
    return np.array([addressof(own.fields) if own else 0 for own in calls], np.int64)


def _segment_fields(segment: StepSegment) -> tuple[int, ...]:
    """Fields of `struct segment` of c/decode_attention.h."""
    bias = 0 if segment.bias is None else segment.bias.data_ptr()
    sides, layout = (segment.keys, segment.values), (segment.starts, segment.lengths)
    keys, values, starts, lengths = (own.data_ptr() for own in (*sides, *layout))
    return keys, values, bias, starts, lengths


def _step_rows(
    keys: Tensor,
    values: Tensor,
    positions: Sequence[int],
    storages: Sequence[StepStorage],
    segments: int,
) -> list[tuple[int, ...]]:
    """Fields of `struct step_row` of c/decode_attention.h, for each sequence.

    Args:
        segments: address of the fields of all segments, those of a sequence side by side.
    """
    item = keys.element_size()
    counts = [len(own.segments) for own in storages]
    firsts = accumulate((count * SEGMENT_BYTES for count in counts), initial=segments)
    (key_stride, next_key, _), (value_stride, next_value, _) = keys.stride(), values.stride()
    first_key, first_value = keys.data_ptr(), values.data_ptr()
    return [
        (
            own.keys.data_ptr(),
            own.values.data_ptr(),
            0 if own.positions is None else own.positions.data_ptr(),
            own.columns.data_ptr(),
            0 if own.bias is None else own.bias.data_ptr(),
            0 if own.logits is None else own.logits.data_ptr(),
            own.starts.data_ptr(),
            own.lengths.data_ptr(),
            first_key + row * next_key * item,
            first_value + row * next_value * item,
            key_stride * item,
            value_stride * item,
            own.columns.shape[0],
            own.keys.shape[0],
            position,
            first,
            len(own.segments),
        )
        for row, (own, position, first) in enumerate(zip(storages, positions, firsts, strict=False))
    ]


def numba_decode_attention(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "C D"],
    values: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    scaling: float,
    bias: Float[Tensor, " C"] | None = None,
    logits: Float[Tensor, "N C"] | None = None,
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """`decode_attention` where no C kernel was compiled, and for heads that are too long for it."""
    from larder.ops.cpu import (
        decode_attention_kernels as kernels,  # compiles: not before it is needed
    )

    num_heads, query_len, head_dim = queries.shape
    rows = query_rows(queries, lengths.shape[0])
    owned = lengths.numpy()
    bounds = _split_bounds(int(owned.sum()), rows.shape[1] * head_dim)
    attend = kernels.attend_in_parallel if bounds.size > 2 else kernels.attend_serially
    outs, lses = attend(
        rows,
        as_numpy(keys),
        as_numpy(values),
        bias_array(bias),
        np.empty((0, 0), np.float32) if logits is None else logits.numpy(),
        starts.numpy(),
        owned,
        np.float32(scaling),
        bounds,
    )
    out = torch.from_numpy(outs).view(num_heads, query_len, head_dim)
    return out, torch.from_numpy(lses).view(num_heads, query_len)


def query_rows(queries: Float[Tensor, "H Q D"], num_kv_heads: int) -> np.ndarray[Any, Any]:
    """Float32 rows [K, R * Q, D]: kernels do not distinguish query heads from queries."""
    rows = queries.float().reshape(num_kv_heads, -1, queries.shape[-1])
    return rows.contiguous().numpy()


def bias_array(bias: Float[Tensor, " C"] | None) -> np.ndarray[Any, Any]:
    """Bias as a float32 array; empty for none."""
    if bias is None:
        return np.empty(0, np.float32)
    return bias.float().contiguous().numpy()


def as_numpy(stored: Tensor) -> np.ndarray[Any, Any]:
    """Numpy view of stored rows; of bfloat16, which numpy lacks, its bits as uint16."""
    if stored.dtype is torch.bfloat16:
        return stored.view(torch.uint16).numpy()
    return stored.numpy()


def num_threads_for(floats: int) -> int:
    """Number of threads for work that reads or multiplies this many floats; at least 1."""
    threads = min(torch.get_num_threads(), floats // SPAN_FLOATS)
    return max(min(threads, _num_threads()), 1) if threads > 1 else 1


def _split_bounds(total: int, floats_per_entry: int) -> np.ndarray[Any, Any]:
    """Bounds of equal spans over the packed entries, one per thread."""
    spans = num_threads_for(total * floats_per_entry)
    return np.array([total * s // spans for s in range(spans + 1)], np.int64)


def _num_threads() -> int:
    """Number of numba's threads in this process, or 1 where starting them is not safe.

    A child process forked after the launch gets 1: GNU OpenMP aborts there.
    """
    with _launch_lock:
        launched_in, num_threads = _start_numba_threads()
    return num_threads if launched_in == os.getpid() else 1


@cache
def _start_numba_threads() -> tuple[int, int]:
    """Start numba's threads once, and restore torch's thread count, which their OpenMP resets."""
    from numba.np.ufunc.parallel import get_num_threads, threading_layer

    torch_threads = torch.get_num_threads()
    num_threads = get_num_threads()  # launches
    torch.set_num_threads(torch_threads)
    return os.getpid(), num_threads if threading_layer() in THREADSAFE_LAYERS else 1
