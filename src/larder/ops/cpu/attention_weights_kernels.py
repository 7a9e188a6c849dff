"""Numba kernels of attention weights, compiled at their first call.

Only `larder.ops.cpu.attention_weights` imports this module, when it calls a kernel.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from larder.ops.cpu.decode_attention_kernels import (
    ROWS,
    add_biases,
    exponentials,
    load_rows,
    njit_kernel,
    njit_parallel,
    scale,
    score,
)

CHUNK = 8 * ROWS  # entries: 1 KiB per query row, 4 chunks for a head of 1,000 entries
MAX, SUM = 0, 1  # any other code is the mean


@njit_kernel
def chunk_bounds(lengths):
    """Head and first entry of every chunk, head by head."""
    count = 0
    for h in range(lengths.size):
        count += (lengths[h] + CHUNK - 1) // CHUNK
    chunks = np.empty((count, 2), np.int64)
    p = 0
    for h in range(lengths.size):
        for first in range(0, lengths[h], CHUNK):
            chunks[p, 0], chunks[p, 1] = h, first
            p += 1
    return chunks


@njit_kernel
def exponentiate_chunk(scaled, keys, biases, first, count, scratch, block, raised, peaks, masses):
    """Logits of stored rows [first, first + count), then exp(logit - peak) of each, and the sum."""
    num_queries = scaled.shape[0]
    peaks[:] = -np.inf
    for offset in range(0, count, ROWS):
        some = min(ROWS, count - offset)
        score(scaled, load_rows(keys, first + offset, some, scratch), block)
        if biases.size:
            add_biases(block, biases, first + offset, some)
        for n in range(num_queries):
            peak = peaks[n]
            for b in range(some):
                peak = max(peak, block[n, b])
            peaks[n] = peak
            for b in range(ROWS):
                raised[n, offset + b] = block[n, b]
    exponentiate_and_sum(raised, count, peaks, masses)


@njit_kernel
def exponentiate_and_sum(raised, count, peaks, masses):
    """exp(logit - peak) of `count` logits in place, and the sum; in whole blocks."""
    for n in range(raised.shape[0]):
        mass = np.float32(0.0)
        for offset in range(0, count, ROWS):
            exponentials(raised[n, offset : offset + ROWS], peaks[n])
        for s in range(count):
            mass += raised[n, s]
        masses[n] = mass


@njit_kernel
def exponentiate_chunks(
    queries, keys, biases, starts, lengths, scaling, chunks, first, stop, buffers
):
    """Exponentials of the chunks [first, stop)."""
    num_queries, head_dim = queries.shape[1:]
    raised, peaks, masses = buffers
    scratch = np.empty((ROWS, head_dim), np.float32)
    block = np.empty((num_queries, ROWS), np.float32)
    scaled = np.empty((num_queries, head_dim), np.float32)
    for p in range(first, stop):
        h, offset = chunks[p]
        count = min(CHUNK, lengths[h] - offset)
        scale(queries[h], scaling, scaled)
        exponentiate_chunk(
            scaled,
            keys,
            biases,
            starts[h] + offset,
            count,
            scratch,
            block,
            raised[p],
            peaks[p],
            masses[p],
        )


@njit_kernel
def softmax_factors(chunks, peaks, masses):
    """Factor from exponentials to softmax weights of each chunk, in place of its mass."""
    num_chunks, num_queries = peaks.shape
    first = 0
    while first < num_chunks:
        stop = first
        while stop < num_chunks and chunks[stop, 0] == chunks[first, 0]:
            stop += 1
        for n in range(num_queries):
            peak = np.float32(-np.inf)
            for p in range(first, stop):
                peak = max(peak, peaks[p, n])
            mass = np.float32(0.0)
            for p in range(first, stop):
                peaks[p, n] = np.float32(math.exp(peaks[p, n] - peak))
                mass += peaks[p, n] * masses[p, n]
            for p in range(first, stop):
                masses[p, n] = peaks[p, n] / mass
        first = stop


@njit_kernel
def reduce_chunk(raised, factors, group_len, join, weights):
    """Sum over the queries of each head, then the reduction over the heads of the group."""
    query_len = factors.size // group_len
    for r in range(group_len):
        if join == MAX and r > 0:
            sums = np.zeros(weights.size, np.float32)
        else:
            sums = weights
        for n in range(r * query_len, (r + 1) * query_len):
            factor = factors[n]
            for s in range(weights.size):
                sums[s] += factor * raised[n, s]
        if join == MAX and r > 0:
            for s in range(weights.size):
                weights[s] = max(weights[s], sums[s])
    if join != MAX and join != SUM:
        for s in range(weights.size):
            weights[s] /= np.float32(group_len)


@njit_kernel
def reduce_chunks(starts, lengths, chunks, first, stop, buffers, group_len, join, weights):
    """Weights of the chunks [first, stop), written to their storage rows."""
    raised, _, factors = buffers
    for p in range(first, stop):
        h, offset = chunks[p]
        begin = starts[h] + offset
        end = starts[h] + min(offset + CHUNK, lengths[h])
        reduce_chunk(raised[p], factors[p], group_len, join, weights[begin:end])


@njit_kernel
def allocate_chunks(num_chunks, num_queries):
    """Buffers for exponentials, peaks and masses of all chunks."""
    return (
        np.empty((num_chunks, num_queries, CHUNK), np.float32),
        np.empty((num_chunks, num_queries), np.float32),
        np.empty((num_chunks, num_queries), np.float32),
    )


@njit_kernel
def weights_from_logits(logits, starts, lengths, group_len, join, weights):
    """`attention_weights` from the logits [N, C] of attention."""
    chunks = chunk_bounds(lengths)
    buffers = allocate_chunks(len(chunks), logits.shape[0])
    raised, peaks, masses = buffers
    for p in range(len(chunks)):
        h, offset = chunks[p]
        count = min(CHUNK, lengths[h] - offset)
        first = starts[h] + offset
        for n in range(logits.shape[0]):
            peak = np.float32(-np.inf)
            for s in range(count):
                raised[p, n, s] = logits[n, first + s]
                peak = max(peak, raised[p, n, s])
            for s in range(count, (count + ROWS - 1) // ROWS * ROWS):
                raised[p, n, s] = peak  # the rest of a block is exponentiated, but not summed
            peaks[p, n] = peak
        exponentiate_and_sum(raised[p], count, peaks[p], masses[p])
    softmax_factors(chunks, peaks, masses)
    reduce_chunks(starts, lengths, chunks, 0, len(chunks), buffers, group_len, join, weights)


@njit_kernel
def head_weights_from_logits(logits, starts, lengths, weights):
    """Softmax of each query over its head alone, into the zeros `weights` [N, C]."""
    for n in range(logits.shape[0]):
        weights_from_logits(logits[n : n + 1], starts, lengths, 1, SUM, weights[n])


@njit_kernel
def attention_weights(
    queries, keys, biases, starts, lengths, scaling, cut, group_len, join, weights
):
    """Attention weights of all chunks, added to the zeros `weights` on one thread."""
    chunks, _ = cut
    buffers = allocate_chunks(len(chunks), queries.shape[1])
    exponentiate_chunks(
        queries, keys, biases, starts, lengths, scaling, chunks, 0, len(chunks), buffers
    )
    softmax_factors(chunks, buffers[1], buffers[2])
    reduce_chunks(starts, lengths, chunks, 0, len(chunks), buffers, group_len, join, weights)


@njit_parallel
def attention_weights_parallel(
    queries, keys, biases, starts, lengths, scaling, cut, group_len, join, weights
):
    """`attention_weights` in parallel, one share of the chunks per thread."""
    chunks, shares = cut
    buffers = allocate_chunks(len(chunks), queries.shape[1])
    for s in numba.prange(shares.size - 1):
        first, stop = shares[s], shares[s + 1]
        exponentiate_chunks(
            queries, keys, biases, starts, lengths, scaling, chunks, first, stop, buffers
        )
    softmax_factors(chunks, buffers[1], buffers[2])
    for s in numba.prange(shares.size - 1):
        reduce_chunks(
            starts, lengths, chunks, shares[s], shares[s + 1], buffers, group_len, join, weights
        )
