"""The inner loops of nearest rows, compiled by numba at their first call.

Only `larder.ops.cpu.nearest` imports this module, and only when it is about to search.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from larder.ops.cpu.decode_attention_kernels import njit_kernel, njit_parallel
from larder.ops.cpu.stored_kernels import ROWS, load_row, load_rows

MIN_NORM = np.float32(1e-12)  # a norm below it counts as this, as in torch's normalize


@njit_kernel
def dots_and_squares(row, rows, dots, squares):
    """Of every row of a block: its product with `row`, and its own length squared.

    Row after row, which is how memory is read fastest: a step that finds one neighbor per head
    takes little longer than reading the keys once.
    """
    for b in range(ROWS):
        dot = square = np.float32(0.0)
        for d in range(row.size):
            number = rows[b, d]
            dot += row[d] * number
            square += number * number
        dots[b], squares[b] = dot, square


@njit_kernel
def nearest_one(stored, start, length, marked, asked, first):
    """Cosine and place of the best marked row of a head for one of its entries."""
    scratch = np.empty((ROWS, stored.shape[1]), np.float32)
    row = np.empty(stored.shape[1], np.float32)
    dots, norms = np.empty(ROWS, np.float32), np.empty(ROWS, np.float32)
    row[:] = load_row(stored, start + asked - first, row)
    total = np.float32(0.0)
    for d in range(row.size):
        total += row[d] * row[d]
    row /= max(np.float32(math.sqrt(total)), MIN_NORM)
    best, place = np.float32(-np.inf), -1
    for offset in range(0, length, ROWS):
        some = min(ROWS, length - offset)
        rows = load_rows(stored, start + offset, some, scratch)
        dots_and_squares(row, rows, dots, norms)
        for b in range(some):
            cosine = dots[b] / max(np.float32(math.sqrt(norms[b])), MIN_NORM)
            if marked[first + offset + b] and cosine > best:
                best, place = cosine, first + offset + b
    return best, place


@njit_kernel
def nearest_all(stored, starts, lengths, marked, asked, heads, cosines, places):
    """All asked entries, one after the other."""
    firsts = np.cumsum(lengths) - lengths
    for f in range(asked.size):
        h = heads[f]
        cosines[f], places[f] = nearest_one(
            stored, starts[h], lengths[h], marked, asked[f], firsts[h]
        )


@njit_parallel
def nearest_all_parallel(stored, starts, lengths, marked, asked, heads, cosines, places):
    """As `nearest_all`, shared by threads."""
    firsts = np.cumsum(lengths) - lengths
    for f in numba.prange(asked.size):
        h = heads[f]
        cosines[f], places[f] = nearest_one(
            stored, starts[h], lengths[h], marked, asked[f], firsts[h]
        )
