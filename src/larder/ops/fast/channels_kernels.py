"""The inner loops of products over few channels, compiled by numba at their first call.

Only `larder.ops.fast.channels` imports this module, and only when it is about to multiply.
"""

from __future__ import annotations

import numba
import numpy as np
from numba.extending import overload

from larder.ops.fast.decode_kernels import compiled, compiled_parallel

SPAN = 2048  # columns whose sums stay in the first-level cache while channels pass by


def float_span(stored, first, stop, scratch):
    """Numbers [first, stop) of a stored row as float32."""
    raise NotImplementedError("only kernels call this; numba picks the form by the stored type")


@overload(float_span)
def _by_stored_type(stored, first, stop, scratch):
    return read_floats if stored.dtype == numba.float32 else widen_bfloats


def read_floats(stored, first, stop, scratch):
    """Floats are read where they lie."""
    return stored[first:stop]


def widen_bfloats(stored, first, stop, scratch):
    """A bfloat16 is the upper half of a float32."""
    bits = scratch.view(np.uint32)
    for c in range(stop - first):
        bits[c] = np.uint32(stored[first + c]) << np.uint32(16)
    return scratch[: stop - first]


@compiled
def add_span(table, picks, weights, first, stop, sums):
    """The sums of one span of columns, for all query heads of a kv head."""
    scratch = np.empty(SPAN, np.float32)
    for g in range(picks.shape[0]):
        out = sums[g, first:stop]
        out[:] = np.float32(0.0)
        for n in range(picks.shape[1]):
            row, weight = float_span(table[picks[g, n]], first, stop, scratch), weights[g, n]
            for c in range(out.size):
                out[c] += weight * row[c]


@compiled
def add_up(tables, picks, weights, sums):
    """All heads and spans, one after the other."""
    length = sums.shape[2]
    for k in range(tables.shape[0]):
        for first in range(0, length, SPAN):
            add_span(tables[k], picks[k], weights[k], first, min(first + SPAN, length), sums[k])


@compiled_parallel
def add_up_in_parallel(tables, picks, weights, sums):
    """As `add_up`, shared by threads."""
    length = sums.shape[2]
    spans = (length + SPAN - 1) // SPAN
    for task in numba.prange(tables.shape[0] * spans):
        k, first = task // spans, task % spans * SPAN
        add_span(tables[k], picks[k], weights[k], first, min(first + SPAN, length), sums[k])
