"""Numba kernels of decode attention, compiled at their first call.

`larder.ops.cpu.decode_attention` imports this module when it calls a kernel, because importing
numba takes a third of a second. Every kernel releases the interpreter lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.extending import overload

# All fastmath flags that preserve infinities.
FASTMATH_FLAGS = frozenset({"reassoc", "contract", "nsz", "arcp"})
LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)
MIN_EXPONENT = np.float32(-126.0)  # the smallest exponent of a normal float32
ROWS = 32  # entries per block: 32 float32 rows of 128 fill half of a 32 KiB first-level cache


def njit_kernel(function: Callable[..., Any]) -> Any:
    """Decorator of a kernel for one thread."""
    return _cached(numba.njit(nogil=True, fastmath=set(FASTMATH_FLAGS))(function))


def njit_exact(function: Callable[..., Any]) -> Any:
    """Decorator of a kernel for one thread without reordered sums or fused products."""
    return _cached(numba.njit(nogil=True)(function))


def njit_parallel(function: Callable[..., Any]) -> Any:
    """Decorator of a kernel whose `prange` runs on numba's threads."""
    return _cached(numba.njit(nogil=True, parallel=True, fastmath=set(FASTMATH_FLAGS))(function))


def _cached(kernel: Any) -> Any:
    try:
        kernel.enable_caching()
    except RuntimeError:  # a read-only package and no writable home: compiled once per process
        pass
    return kernel


@njit_kernel
def score(queries, rows, weights):
    """Logits of one block of key rows; four rows at a time keep four sums in registers."""
    num_queries, head_dim = queries.shape
    for n in range(num_queries):
        for b in range(0, ROWS, 4):
            s0 = s1 = s2 = s3 = np.float32(0.0)
            for d in range(head_dim):
                query = queries[n, d]
                s0 += query * rows[b, d]
                s1 += query * rows[b + 1, d]
                s2 += query * rows[b + 2, d]
                s3 += query * rows[b + 3, d]
            weights[n, b], weights[n, b + 1] = s0, s1
            weights[n, b + 2], weights[n, b + 3] = s2, s3


@njit_kernel
def add_biases(weights, biases, first, count):
    """Add the bias of each stored row of a block to its logits."""
    for n in range(weights.shape[0]):
        for b in range(count):
            weights[n, b] += biases[first + b]


@njit_kernel
def exponentials(weights, peak):
    """Vectorizable exp(weights - peak) in place: 2^whole by exponent bits, 2^part by a series."""
    bits = weights.view(np.int32)
    for b in range(ROWS):
        power = (weights[b] - peak) * LOG2_E
        if power < MIN_EXPONENT:  # not max(): a NaN must stay a NaN
            power = MIN_EXPONENT
        whole = np.floor(power + np.float32(0.5))
        x = (power - whole) * LN_2
        series = np.float32(1 / 720) + x * np.float32(1 / 5040)
        series = np.float32(1 / 24) + x * (np.float32(1 / 120) + x * series)
        series = np.float32(1 / 2) + x * (np.float32(1 / 6) + x * series)
        weights[b] = np.float32(1.0) + x * (np.float32(1.0) + x * series)
        bits[b] += np.int32(whole) << np.int32(23)


@njit_kernel
def online_softmax(weights, count, peaks, masses, outs):
    """Turn the logits of a block into weights, and rescale earlier sums to the new peak."""
    for n in range(peaks.size):
        peak = peaks[n]
        for b in range(count):
            peak = max(peak, weights[n, b])
        if peak > peaks[n]:
            faded = np.float32(math.exp(peaks[n] - peak))
            masses[n] *= faded
            for d in range(outs.shape[1]):
                outs[n, d] *= faded
            peaks[n] = peak
        exponentials(weights[n], peak)
        mass = np.float32(0.0)
        for b in range(count):
            mass += weights[n, b]
        masses[n] += mass
        for b in range(count, ROWS):
            weights[n, b] = np.float32(0.0)


@njit_kernel
def accumulate_values(weights, rows, outs):
    """Add the weighted value rows of one block, four at a time."""
    num_queries, head_dim = outs.shape
    for n in range(num_queries):
        for b in range(0, ROWS, 4):
            w0, w1, w2, w3 = weights[n, b], weights[n, b + 1], weights[n, b + 2], weights[n, b + 3]
            for d in range(head_dim):
                outs[n, d] += (
                    w0 * rows[b, d]
                    + w1 * rows[b + 1, d]
                    + w2 * rows[b + 2, d]
                    + w3 * rows[b + 3, d]
                )


@njit_kernel
def store_logits(weights, first, count, logits):
    """Write the logits of one block to the columns of its storage rows."""
    for n in range(weights.shape[0]):
        for b in range(count):
            logits[n, first + b] = weights[n, b]


@njit_kernel
def attend_rows(
    queries, keys, values, biases, logits, first, stop, peaks, masses, outs, scratch, weights
):
    """Unnormalized attention of `queries` [N, D] over stored rows [first, stop).

    Empty `biases` or `logits` cost one branch per block.
    """
    peaks[:] = -np.inf
    masses[:] = 0.0
    outs[:] = 0.0
    for block in range(first, stop, ROWS):
        count = min(ROWS, stop - block)
        score(queries, load_rows(keys, block, count, scratch), weights)
        if biases.size:
            add_biases(weights, biases, block, count)
        if logits.size:
            store_logits(weights, block, count, logits)
        online_softmax(weights, count, peaks, masses, outs)
        accumulate_values(weights, load_rows(values, block, count, scratch), outs)


@njit_kernel
def scale(queries, scaling, scaled):
    """Queries times the scaling in a scalar loop: array copies take numba seconds to compile."""
    for n in range(queries.shape[0]):
        for d in range(queries.shape[1]):
            scaled[n, d] = queries[n, d] * scaling


@njit_kernel
def attend_span(
    queries,
    keys,
    values,
    biases,
    logits,
    starts,
    lengths,
    scaling,
    bounds,
    span,
    peaks,
    masses,
    outs,
):
    """Attention over the packed entries of one span, which may cross heads.

    Result row `span + head` is unique: along the packed entries every new part increments span or
    head, so no two parts share a row.
    """
    num_queries, head_dim = queries.shape[1:]
    scratch = np.empty((ROWS, head_dim), np.float32)
    weights = np.empty((num_queries, ROWS), np.float32)
    scaled = np.empty((num_queries, head_dim), np.float32)
    offset = 0
    for h in range(lengths.size):
        begin = starts[h] + max(bounds[span] - offset, 0)
        end = starts[h] + min(bounds[span + 1] - offset, lengths[h])
        offset += lengths[h]
        if begin < end:
            p = span + h
            scale(queries[h], scaling, scaled)
            sums = peaks[p], masses[p], outs[p]
            attend_rows(scaled, keys, values, biases, logits, begin, end, *sums, scratch, weights)


@njit_kernel
def merge_splits(lengths, bounds, peaks, masses, partials):
    """Merge the parts of every head by log-sum-exp; a head without entries gives 0 and -inf."""
    num_queries, head_dim = partials.shape[1:]
    outs = np.zeros((lengths.size, num_queries, head_dim), np.float32)
    lses = np.full((lengths.size, num_queries), np.float32(-np.inf))
    offset = 0
    for h in range(lengths.size):
        for n in range(num_queries):
            mass = np.float32(0.0)
            for s in range(bounds.size - 1):
                if max(bounds[s], offset) < min(bounds[s + 1], offset + lengths[h]):
                    p = s + h
                    peak = max(peaks[p, n], lses[h, n])  # lses stores the peak until the end
                    faded = np.float32(math.exp(lses[h, n] - peak))
                    share = np.float32(math.exp(peaks[p, n] - peak))
                    mass = mass * faded + share * masses[p, n]
                    lses[h, n] = peak
                    for d in range(head_dim):
                        outs[h, n, d] = outs[h, n, d] * faded + share * partials[p, n, d]
            if lengths[h] > 0:
                lses[h, n] += np.float32(math.log(mass))
                for d in range(head_dim):
                    outs[h, n, d] /= mass
        offset += lengths[h]
    return outs, lses


@njit_kernel
def attend_serially(queries, keys, values, biases, logits, starts, lengths, scaling, bounds):
    """Attention over all spans, on one thread: output [K, N, D] and log-sum-exp [K, N].

    `logits` [N, C] receive the logits of each stored row; empty if they are not needed.
    """
    num_pieces = bounds.size - 1 + lengths.size
    peaks = np.empty((num_pieces, queries.shape[1]), np.float32)
    masses = np.empty((num_pieces, queries.shape[1]), np.float32)
    outs = np.empty((num_pieces, queries.shape[1], queries.shape[2]), np.float32)
    for s in range(bounds.size - 1):
        attend_span(
            queries,
            keys,
            values,
            biases,
            logits,
            starts,
            lengths,
            scaling,
            bounds,
            s,
            peaks,
            masses,
            outs,
        )
    return merge_splits(lengths, bounds, peaks, masses, outs)


@njit_parallel
def attend_in_parallel(queries, keys, values, biases, logits, starts, lengths, scaling, bounds):
    """`attend_serially` in parallel, one span per thread, with equal results."""
    num_pieces = bounds.size - 1 + lengths.size
    peaks = np.empty((num_pieces, queries.shape[1]), np.float32)
    masses = np.empty((num_pieces, queries.shape[1]), np.float32)
    outs = np.empty((num_pieces, queries.shape[1], queries.shape[2]), np.float32)
    for s in numba.prange(bounds.size - 1):
        attend_span(
            queries,
            keys,
            values,
            biases,
            logits,
            starts,
            lengths,
            scaling,
            bounds,
            np.int64(s),  # an unsigned index would compile the kernel a second time
            peaks,
            masses,
            outs,
        )
    return merge_splits(lengths, bounds, peaks, masses, outs)


def load_rows(stored, first, count, scratch):
    """Stored rows [first, first + count) as ROWS rows of float32, padded with zeros."""
    raise NotImplementedError("only kernels call this; numba picks the form by the stored type")


@overload(load_rows)
def _float_rows_by_dtype(stored, first, count, scratch):
    return load_float32_rows if stored.dtype == numba.float32 else load_bfloat16_rows


def load_float32_rows(stored, first, count, scratch):
    """View of a whole block, or a zero-padded copy."""
    if count == ROWS:
        return stored[first : first + ROWS]
    for b in range(count):
        for d in range(stored.shape[1]):
            scratch[b, d] = stored[first + b, d]
    scratch[count:] = 0.0
    return scratch


def load_bfloat16_rows(stored, first, count, scratch):
    """Rows widened from bfloat16, the upper half of a float32."""
    bits = scratch.view(np.uint32)
    for b in range(count):
        for d in range(stored.shape[1]):
            bits[b, d] = np.uint32(stored[first + b, d]) << np.uint32(16)
    scratch[count:] = 0.0
    return scratch


def load_row(stored, row, scratch):
    """Stored row as float32."""
    raise NotImplementedError("only kernels call this; numba picks the form by the stored type")


@overload(load_row)
def _float_row_by_dtype(stored, row, scratch):
    if stored.dtype == numba.float32:
        return lambda stored, row, scratch: stored[row]
    return load_bfloat16_row


def load_bfloat16_row(stored, row, scratch):
    """Row widened from bfloat16."""
    bits = scratch.view(np.uint32)
    for d in range(stored.shape[1]):
        bits[d] = np.uint32(stored[row, d]) << np.uint32(16)
    return scratch
