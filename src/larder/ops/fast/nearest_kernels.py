"""The inner loops of nearest rows, compiled by numba at their first call.

Only `larder.ops.fast.nearest` imports this module, and only when it is about to search.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from larder.ops.fast.decode_kernels import ROWS, compiled, compiled_parallel, float_rows

SMALLEST = np.float32(1e-12)  # a norm below it counts as this, as in torch's normalize


@compiled
def squares(rows, norms):
    """Lengths of the rows of one block, squared; four sums in registers."""
    head_dim = rows.shape[1]
    for b in range(0, ROWS, 4):
        s0 = s1 = s2 = s3 = np.float32(0.0)
        for d in range(head_dim):
            s0 += rows[b, d] * rows[b, d]
            s1 += rows[b + 1, d] * rows[b + 1, d]
            s2 += rows[b + 2, d] * rows[b + 2, d]
            s3 += rows[b + 3, d] * rows[b + 3, d]
        norms[b], norms[b + 1], norms[b + 2], norms[b + 3] = s0, s1, s2, s3


@compiled
def products(row, rows, dots):
    """Inner products of one row with a block of rows."""
    head_dim = row.size
    for b in range(0, ROWS, 4):
        s0 = s1 = s2 = s3 = np.float32(0.0)
        for d in range(head_dim):
            s0 += row[d] * rows[b, d]
            s1 += row[d] * rows[b + 1, d]
            s2 += row[d] * rows[b + 2, d]
            s3 += row[d] * rows[b + 3, d]
        dots[b], dots[b + 1], dots[b + 2], dots[b + 3] = s0, s1, s2, s3


@compiled
def search_one(stored, start, length, marked, asked, first):
    """Cosine and place of the best marked row of a head for one of its entries."""
    scratch = np.empty((ROWS, stored.shape[1]), np.float32)
    row = np.empty(stored.shape[1], np.float32)
    norms, dots = np.empty(ROWS, np.float32), np.empty(ROWS, np.float32)
    row[:] = float_rows(stored, start + asked - first, 1, scratch)[0]
    total = np.float32(0.0)
    for d in range(row.size):
        total += row[d] * row[d]
    row /= max(np.float32(math.sqrt(total)), SMALLEST)
    best, place = np.float32(-np.inf), -1
    for offset in range(0, length, ROWS):
        some = min(ROWS, length - offset)
        rows = float_rows(stored, start + offset, some, scratch)
        squares(rows, norms)
        products(row, rows, dots)
        for b in range(some):
            cosine = dots[b] / max(np.float32(math.sqrt(norms[b])), SMALLEST)
            if marked[first + offset + b] and cosine > best:
                best, place = cosine, first + offset + b
    return best, place


@compiled
def search(stored, starts, lengths, marked, asked, heads, cosines, places):
    """All asked entries, one after the other."""
    firsts = np.cumsum(lengths) - lengths
    for f in range(asked.size):
        h = heads[f]
        cosines[f], places[f] = search_one(
            stored, starts[h], lengths[h], marked, asked[f], firsts[h]
        )


@compiled_parallel
def search_in_parallel(stored, starts, lengths, marked, asked, heads, cosines, places):
    """As `search`, shared by threads."""
    firsts = np.cumsum(lengths) - lengths
    for f in numba.prange(asked.size):
        h = heads[f]
        cosines[f], places[f] = search_one(
            stored, starts[h], lengths[h], marked, asked[f], firsts[h]
        )
