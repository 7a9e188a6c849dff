"""How kernels read stored rows, whatever their type, compiled by numba at their first call."""

from __future__ import annotations

import numba
import numpy as np
from numba.extending import overload

ROWS = 32  # entries per block: 32 float32 rows of 128 fill half of a 32 KiB first-level cache


def load_rows(stored, first, count, scratch):
    """Stored rows [first, first + count) as ROWS rows of float32; those past `count` are zero."""
    raise NotImplementedError("only kernels call this; numba picks the form by the stored type")


@overload(load_rows)
def _float_rows_by_dtype(stored, first, count, scratch):
    return load_float32_rows if stored.dtype == numba.float32 else load_bfloat16_rows


def load_float32_rows(stored, first, count, scratch):
    """Whole blocks are read where they lie."""
    if count == ROWS:
        return stored[first : first + ROWS]
    for b in range(count):
        for d in range(stored.shape[1]):
            scratch[b, d] = stored[first + b, d]
    scratch[count:] = 0.0
    return scratch


def load_bfloat16_rows(stored, first, count, scratch):
    """A bfloat16 is the upper half of a float32."""
    bits = scratch.view(np.uint32)
    for b in range(count):
        for d in range(stored.shape[1]):
            bits[b, d] = np.uint32(stored[first + b, d]) << np.uint32(16)
    scratch[count:] = 0.0
    return scratch


def load_row(stored, row, scratch):
    """One stored row as float32."""
    raise NotImplementedError("only kernels call this; numba picks the form by the stored type")


@overload(load_row)
def _float_row_by_dtype(stored, row, scratch):
    if stored.dtype == numba.float32:
        return lambda stored, row, scratch: stored[row]
    return load_bfloat16_row


def load_bfloat16_row(stored, row, scratch):
    """As `load_bfloat16_rows`, of a single row."""
    bits = scratch.view(np.uint32)
    for d in range(stored.shape[1]):
        bits[d] = np.uint32(stored[row, d]) << np.uint32(16)
    return scratch
