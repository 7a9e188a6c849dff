"""The inner loops of row weights, compiled by numba at their first call.

Only `larder.ops.fast.rows` imports this module, and only when it is about to weigh.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from larder.ops.fast.decode_kernels import (
    ROWS,
    add_biases,
    compiled,
    compiled_parallel,
    exponentials,
    float_rows,
    scale,
    score,
)

PIECE = 8 * ROWS  # entries: a piece of one query row is 1 KiB, and a head of 1,000 has four
MAX, SUM = 0, 1  # what else is a mean


@compiled
def pieces_of(lengths):
    """Head and first entry of every piece, head by head."""
    count = 0
    for h in range(lengths.size):
        count += (lengths[h] + PIECE - 1) // PIECE
    pieces = np.empty((count, 2), np.int64)
    p = 0
    for h in range(lengths.size):
        for first in range(0, lengths[h], PIECE):
            pieces[p, 0], pieces[p, 1] = h, first
            p += 1
    return pieces


@compiled
def raise_piece(scaled, keys, biases, first, count, scratch, block, raised, peaks, masses):
    """Logits of `count` stored rows from `first` on, then exp(logit - peak) of each and the sum."""
    num_queries = scaled.shape[0]
    peaks[:] = -np.inf
    for offset in range(0, count, ROWS):
        some = min(ROWS, count - offset)
        score(scaled, float_rows(keys, first + offset, some, scratch), block)
        if biases.size:
            add_biases(block, biases, first + offset, some)
        for n in range(num_queries):
            peak = peaks[n]
            for b in range(some):
                peak = max(peak, block[n, b])
            peaks[n] = peak
            for b in range(ROWS):
                raised[n, offset + b] = block[n, b]
    sum_raised(raised, count, peaks, masses)


@compiled
def sum_raised(raised, count, peaks, masses):
    """exp(logit - peak) in place of `count` logits, and the sum; in whole blocks."""
    for n in range(raised.shape[0]):
        mass = np.float32(0.0)
        for offset in range(0, count, ROWS):
            exponentials(raised[n, offset : offset + ROWS], peaks[n])
        for s in range(count):
            mass += raised[n, s]
        masses[n] = mass


@compiled
def raise_share(queries, keys, biases, starts, lengths, scaling, pieces, first, stop, held):
    """The pieces [first, stop), one after the other."""
    num_queries, head_dim = queries.shape[1:]
    raised, peaks, masses = held
    scratch = np.empty((ROWS, head_dim), np.float32)
    block = np.empty((num_queries, ROWS), np.float32)
    scaled = np.empty((num_queries, head_dim), np.float32)
    for p in range(first, stop):
        h, offset = pieces[p]
        count = min(PIECE, lengths[h] - offset)
        scale(queries[h], scaling, scaled)
        raise_piece(
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


@compiled
def factors_of(pieces, peaks, masses):
    """What turns the exponentials of each piece into softmax weights, in place of its mass."""
    num_pieces, num_queries = peaks.shape
    first = 0
    while first < num_pieces:
        stop = first
        while stop < num_pieces and pieces[stop, 0] == pieces[first, 0]:
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


@compiled
def join_piece(raised, factors, group_len, join, weights):
    """Sum over the queries of each head, then over, or the highest of, the heads of the group."""
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


@compiled
def join_share(starts, lengths, pieces, first, stop, held, group_len, join, weights):
    """The pieces [first, stop), into the rows where they are stored."""
    raised, _, factors = held
    for p in range(first, stop):
        h, offset = pieces[p]
        begin = starts[h] + offset
        end = starts[h] + min(offset + PIECE, lengths[h])
        join_piece(raised[p], factors[p], group_len, join, weights[begin:end])


@compiled
def space_for(num_pieces, num_queries):
    """Exponentials, peaks and masses of all pieces."""
    return (
        np.empty((num_pieces, num_queries, PIECE), np.float32),
        np.empty((num_pieces, num_queries), np.float32),
        np.empty((num_pieces, num_queries), np.float32),
    )


@compiled
def weigh_logits(logits, starts, lengths, group_len, join, weights):
    """As `weigh_serially`, from logits [N, C] that attention left behind."""
    pieces = pieces_of(lengths)
    held = space_for(len(pieces), logits.shape[0])
    raised, peaks, masses = held
    for p in range(len(pieces)):
        h, offset = pieces[p]
        count = min(PIECE, lengths[h] - offset)
        first = starts[h] + offset
        for n in range(logits.shape[0]):
            peak = np.float32(-np.inf)
            for s in range(count):
                raised[p, n, s] = logits[n, first + s]
                peak = max(peak, raised[p, n, s])
            for s in range(count, (count + ROWS - 1) // ROWS * ROWS):
                raised[p, n, s] = peak  # the rest of a block is raised too, and not counted
            peaks[p, n] = peak
        sum_raised(raised[p], count, peaks[p], masses[p])
    factors_of(pieces, peaks, masses)
    join_share(starts, lengths, pieces, 0, len(pieces), held, group_len, join, weights)


@compiled
def spread_logits(logits, starts, lengths, weights):
    """The softmax of each query over its head alone, into `weights` [N, C], which are zeros."""
    for n in range(logits.shape[0]):
        weigh_logits(logits[n : n + 1], starts, lengths, 1, SUM, weights[n])


@compiled
def weigh_serially(queries, keys, biases, starts, lengths, scaling, cut, group_len, join, weights):
    """All pieces one after the other, into `weights`, which are zeros."""
    pieces, _ = cut
    held = space_for(len(pieces), queries.shape[1])
    raise_share(queries, keys, biases, starts, lengths, scaling, pieces, 0, len(pieces), held)
    factors_of(pieces, held[1], held[2])
    join_share(starts, lengths, pieces, 0, len(pieces), held, group_len, join, weights)


@compiled_parallel
def weigh_in_parallel(
    queries, keys, biases, starts, lengths, scaling, cut, group_len, join, weights
):
    """As `weigh_serially`, one share of the pieces per thread."""
    pieces, shares = cut
    held = space_for(len(pieces), queries.shape[1])
    for s in numba.prange(shares.size - 1):
        first, stop = shares[s], shares[s + 1]
        raise_share(queries, keys, biases, starts, lengths, scaling, pieces, first, stop, held)
    factors_of(pieces, held[1], held[2])
    for s in numba.prange(shares.size - 1):
        join_share(
            starts, lengths, pieces, shares[s], shares[s + 1], held, group_len, join, weights
        )
