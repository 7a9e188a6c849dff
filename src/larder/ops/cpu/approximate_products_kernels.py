"""Numba kernels of approximate products, compiled at their first call.

Only `larder.ops.cpu.approximate_products` imports this module, when it calls a kernel.
"""

from __future__ import annotations

import numba
import numpy as np
from numba.extending import overload

from larder.ops.cpu.decode_attention_kernels import njit_kernel, njit_parallel

SPAN = 1024  # columns whose sums stay in the first-level cache during the loop over channels


def load_span(stored, first, stop, scratch):
    """Numbers [first, stop) of a stored row as float32."""
    raise NotImplementedError("only kernels call this; numba picks the form by the stored type")


@overload(load_span)
def _span_by_dtype(stored, first, stop, scratch):
    return load_float32_span if stored.dtype == numba.float32 else load_bfloat16_span


def load_float32_span(stored, first, stop, scratch):
    """View of a float32 row."""
    return stored[first:stop]


def load_bfloat16_span(stored, first, stop, scratch):
    """Row widened from bfloat16, the upper half of a float32."""
    halves = stored[first:stop]
    bits = scratch[: halves.size].view(np.uint32)
    for c in range(halves.size):
        bits[c] = np.uint32(halves[c]) << np.uint32(16)
    return scratch[: halves.size]


@njit_kernel
def same_picks(picks, g, n, stop):
    """True if a query head picks the same rows as the one before it."""
    for m in range(n, stop):
        if picks[g, m] != picks[g - 1, m]:
            return False
    return True


@njit_kernel
def add_four(weights, a, b, c, d, out):
    """Add four weighted rows in one loop over the sums."""
    for i in range(out.size):
        out[i] += weights[0] * a[i] + weights[1] * b[i] + weights[2] * c[i] + weights[3] * d[i]


@njit_kernel
def load_four_rows(table, rows, first, stop, scratch):
    """Rows at four indices; if fewer are left, the last one repeats."""
    last = min(4, rows.size) - 1
    return (
        load_span(table[rows[0]], first, stop, scratch[0]),
        load_span(table[rows[min(1, last)]], first, stop, scratch[1]),
        load_span(table[rows[min(2, last)]], first, stop, scratch[2]),
        load_span(table[rows[min(3, last)]], first, stop, scratch[3]),
    )


@njit_kernel
def add_span(table, picks, weights, first, stop, sums):
    """Sums of one span of columns, for all query heads of a kv head."""
    scratch = np.empty((4, SPAN), np.float32)
    four = np.empty(4, np.float32)
    group, count = picks.shape
    sums[:, first:stop] = np.float32(0.0)
    for n in range(0, count, 4):
        some = min(4, count - n)
        a, b, c, d = load_four_rows(table, picks[0, n:], first, stop, scratch)
        for g in range(group):
            if g > 0 and not same_picks(picks, g, n, n + some):
                a, b, c, d = load_four_rows(table, picks[g, n:], first, stop, scratch)
            four[:] = np.float32(0.0)  # repeated rows get weight 0
            for i in range(some):
                four[i] = weights[g, n + i]
            add_four(four, a, b, c, d, sums[g, first:stop])


@njit_kernel
def accumulate_channels(tables, picks, weights, sums):
    """Weighted sums of channels for all heads and spans, on one thread."""
    length = sums.shape[2]
    for k in range(tables.shape[0]):
        for first in range(0, length, SPAN):
            add_span(tables[k], picks[k], weights[k], first, min(first + SPAN, length), sums[k])


@njit_parallel
def accumulate_channels_parallel(tables, picks, weights, sums):
    """`accumulate_channels` in parallel over spans."""
    length = sums.shape[2]
    spans = (length + SPAN - 1) // SPAN
    for task in numba.prange(tables.shape[0] * spans):
        k, first = task // spans, task % spans * SPAN
        add_span(tables[k], picks[k], weights[k], first, min(first + SPAN, length), sums[k])


@njit_kernel
def sum_codes_of_head(table, codes, sums):
    """Sums of one query head."""
    sums[:] = np.float32(0.0)
    for v in range(table.shape[0]):
        values, rows = table[v], codes[v]
        for s in range(sums.size):
            sums[s] += values[rows[s]]


@njit_kernel
def sum_codes(tables, codes, sums):
    """Sums of table values by codes for all query heads, on one thread."""
    for k in range(sums.shape[0]):
        for g in range(sums.shape[1]):
            sum_codes_of_head(tables[k, g], codes[k], sums[k, g])


@njit_parallel
def sum_codes_parallel(tables, codes, sums):
    """`sum_codes` in parallel over query heads."""
    group = sums.shape[1]
    for n in numba.prange(sums.shape[0] * group):
        sum_codes_of_head(
            tables[n // group, n % group], codes[n // group], sums[n // group, n % group]
        )
