"""Eviction behind a decode step: all layers of all sequences in one call of a C kernel.

The call adds the attention of the new token to a column, rejects the lowest entries of each head,
merges them into kept ones where that is asked for, and closes the gaps. It gives the same bits as
the observer of the pass, which evicts layer by layer through plans and is the form for all other
policies, storages and devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import numpy as np
import torch
from torch import Tensor

from larder.core.plan import StepMerging
from larder.ops.cpu.c_library import EvictionCall, c_library
from larder.ops.cpu.decode_attention import SUPPORTED_DTYPES, EvictedLayer

DONE, LEFT, FAILED = range(3)
NO_MERGING = StepMerging("", 0.0, 0.0)
LEAST_FLOATS = 1 << 15  # of keys and values per thread; for less, waking it costs more


def supports(keys: Tensor, values: Tensor, columns: Tensor) -> bool:
    """True for contiguous storage in host memory, where the C kernel was compiled."""
    return (
        keys.device.type == "cpu"
        and keys.dtype in SUPPORTED_DTYPES
        and values.dtype is keys.dtype
        and values.shape == keys.shape
        and keys.is_contiguous()
        and values.is_contiguous()
        and columns.is_contiguous()
        and c_library() is not None
    )


def evict_step(
    layers: Sequence[EvictedLayer], roomy: int, merging: StepMerging = NO_MERGING
) -> list[int | None]:
    """Evict from layers that `supports` allows.

    Args:
        roomy: least slack at which the front of a head may move.

    Returns:
        The slack behind the fullest head of each layer; None for a layer that has not changed,
        because a score is not a number or more entries must go than the kernel rejects.

    Raises:
        MemoryError: buffers could not be allocated; layers are half changed.
    """
    library = c_library()
    assert library is not None
    edges = np.array([edge for own in layers for edge in own.edges], np.int64)
    rows, place = [], edges.ctypes.data
    for own in layers:
        rows.append(_fields(own, place))
        place += len(own.edges) * edges.itemsize
    table = np.array(rows, np.int64)
    floats = sum(2 * own.keys.numel() for own in layers)
    call = EvictionCall(
        layers=table.ctypes.data,
        count=len(layers),
        roomy=roomy,
        rate=merging.rate,
        rest=1 - merging.rate,
        slack=merging.slack,
        threads=min(torch.get_num_threads(), len(layers), floats // LEAST_FLOATS + 1),
    )
    library.larder_evict_step(byref(call))
    ends = table[:, -2:].tolist()
    if any(status == FAILED for _, status in ends):
        raise MemoryError("The merges of entries could not allocate their buffers.")
    return [room if status == DONE else None for room, status in ends]


def _fields(own: EvictedLayer, edges: int) -> tuple[int, ...]:
    """Fields of `struct evicted` of c/decode_eviction.c."""
    stored, item, columns = len(own.keys), own.keys.element_size(), own.columns.data_ptr()
    column_bytes = stored * own.columns.element_size()
    return (
        own.keys.data_ptr(),
        own.values.data_ptr(),
        own.positions.data_ptr(),
        columns,
        own.logits.data_ptr(),
        own.starts.data_ptr(),
        own.lengths.data_ptr(),
        edges,
        columns + own.column * column_bytes,
        0 if own.log_counts is None else columns + own.log_counts * column_bytes,
        0 if own.thresholds is None else own.thresholds.data_ptr(),
        own.keys.shape[1] * item,
        item,
        len(own.columns),
        stored,
        own.logits.stride(0),
        len(own.lengths),
        len(own.logits),
        -1 if own.count is None else own.count,
        own.first,
        own.stop,
        0,
        LEFT,
    )
