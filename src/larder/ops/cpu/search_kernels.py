"""Numba kernels of key search, compiled at their first call.

Only `larder.ops.cpu.search` and other kernels import this module.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from larder.ops.cpu.decode_attention_kernels import (
    ROWS,
    load_row,
    load_rows,
    njit_kernel,
    njit_parallel,
    score,
)

CHUNK = 32 * ROWS  # entries that a thread takes at a time
MIN_NORM = np.float32(1e-12)  # lower bound of norms, as in torch's normalize


@njit_kernel
def page_chunks(lengths, page):
    """Head and entries [first, stop) of every chunk of whole pages."""
    step = (CHUNK + page - 1) // page * page
    count = 0
    for h in range(lengths.size):
        count += (lengths[h] + step - 1) // step
    chunks = np.empty((count, 3), np.int64)
    p = 0
    for h in range(lengths.size):
        for first in range(0, lengths[h], step):
            chunks[p, 0], chunks[p, 1] = h, first
            chunks[p, 2] = min(first + step, lengths[h])
            p += 1
    return chunks


@njit_kernel
def score_chunk(queries, stored, start, first, stop, page, bests):
    """Maxima of the pages in [first, stop), in one pass over the rows."""
    scratch = np.empty((ROWS, stored.shape[1]), np.float32)
    scores = np.empty((queries.shape[0], ROWS), np.float32)
    for block in range(first, stop, ROWS):
        count = min(ROWS, stop - block)
        score(queries, load_rows(stored, start + block, count, scratch), scores)
        for r in range(queries.shape[0]):
            for b in range(count):
                at = (block + b) // page
                bests[r, at] = max(bests[r, at], scores[r, b])


@njit_kernel
def score_pages(queries, stored, starts, lengths, page, chunks, bests):
    """Scores of pages of all chunks, on one thread."""
    for p in range(len(chunks)):
        h, first, stop = chunks[p]
        score_chunk(queries[h], stored, starts[h], first, stop, page, bests[h])


@njit_parallel
def score_pages_parallel(queries, stored, starts, lengths, page, chunks, bests):
    """`score_pages` in parallel over chunks."""
    for p in numba.prange(len(chunks)):
        h, first, stop = chunks[p]
        score_chunk(queries[h], stored, starts[h], first, stop, page, bests[h])


@njit_kernel
def precedes(value, number, other, its_number):
    """True if the first ranks higher: by value, ties by the lower number."""
    return value > other or (value == other and number < its_number)


@njit_kernel
def insert_ranked(value, number, values, numbers, held):
    """Insert a number into a ranked list, and return its new length; a full list drops its last."""
    if held == values.size:
        if held == 0 or not precedes(value, number, values[held - 1], numbers[held - 1]):
            return held
        held -= 1
    at = held
    while at > 0 and precedes(value, number, values[at - 1], numbers[at - 1]):
        at -= 1
    for slot in range(held, at, -1):
        values[slot], numbers[slot] = values[slot - 1], numbers[slot - 1]
    values[at], numbers[at] = value, number
    return held + 1


@njit_kernel
def is_worse(value, number, other, other_number):
    """True if the first ranks lower: by value, ties by the higher number."""
    return value < other or (value == other and number > other_number)


@njit_kernel
def sift_down(values, numbers, held):
    """Restore a heap (worst on top) after a change of its top."""
    value, number, at = values[0], numbers[0], 0
    while 2 * at + 1 < held:
        child = 2 * at + 1
        next_one = child + 1
        if next_one < held and is_worse(
            values[next_one], numbers[next_one], values[child], numbers[child]
        ):
            child = next_one
        if not is_worse(values[child], numbers[child], value, number):
            break
        values[at], numbers[at] = values[child], numbers[child]
        at = child
    values[at], numbers[at] = value, number


@njit_kernel
def sift_up(values, numbers, at):
    """Restore a heap after an append."""
    value, number = values[at], numbers[at]
    while at > 0:
        parent = (at - 1) // 2
        if not is_worse(value, number, values[parent], numbers[parent]):
            break
        values[at], numbers[at] = values[parent], numbers[parent]
        at = parent
    values[at], numbers[at] = value, number


@njit_kernel
def top_row(scores, best):
    """Indices of the highest scores of one row, by a heap with the worst on top."""
    if best.size == 0:
        return
    values = np.empty(best.size, np.float32)
    held = 0
    for n in range(scores.size):
        score = scores[n]
        if held < best.size:
            if score != -np.inf:
                values[held], best[held] = score, n
                sift_up(values, best, held)
                held += 1
        elif score > values[0]:
            values[0], best[0] = score, n
            sift_down(values, best, held)
    for last in range(held - 1, 0, -1):
        values[0], values[last] = values[last], values[0]
        best[0], best[last] = best[last], best[0]
        sift_down(values, best, last)


@njit_kernel
def top_rows(scores, best):
    """Highest scores of all rows, on one thread."""
    for row in range(len(scores)):
        top_row(scores[row], best[row])


@njit_parallel
def top_rows_parallel(scores, best):
    """`top_rows` in parallel over rows."""
    for row in numba.prange(len(scores)):
        top_row(scores[row], best[row])


@njit_kernel
def interleave(ranked, group, united):
    """Interleave the rankings of a group, each number once."""
    for k in range(len(united)):
        held = 0
        for p in range(ranked.shape[1]):
            for r in range(group):
                number = ranked[k * group + r, p]
                new = number >= 0
                for at in range(held):
                    new = new and united[k, at] != number
                if new and held < united.shape[1]:
                    united[k, held] = number
                    held += 1


@njit_kernel
def dots_and_squares(row, rows, dots, squares):
    """Product with `row` and squared norm of every row of a block.

    Row by row, the fastest order for memory: a step that finds one neighbor per head takes little
    longer than reading the keys once.
    """
    for b in range(ROWS):
        dot = square = np.float32(0.0)
        for d in range(row.size):
            number = rows[b, d]
            dot += row[d] * number
            square += number * number
        dots[b], squares[b] = dot, square


@njit_kernel
def nearest_one(stored, start, length, marked, query_rows, first):
    """Cosine and packed index of the nearest marked row of a head for one of its entries."""
    scratch = np.empty((ROWS, stored.shape[1]), np.float32)
    row = np.empty(stored.shape[1], np.float32)
    dots, norms = np.empty(ROWS, np.float32), np.empty(ROWS, np.float32)
    loaded = load_row(stored, start + query_rows - first, row)
    total = np.float32(0.0)
    for d in range(row.size):
        row[d] = loaded[d]
        total += row[d] * row[d]
    row /= max(np.float32(math.sqrt(total)), MIN_NORM)
    best, nearest = np.float32(-np.inf), -1
    for offset in range(0, length, ROWS):
        some = min(ROWS, length - offset)
        rows = load_rows(stored, start + offset, some, scratch)
        dots_and_squares(row, rows, dots, norms)
        for b in range(some):
            cosine = dots[b] / max(np.float32(math.sqrt(norms[b])), MIN_NORM)
            if marked[first + offset + b] and cosine > best:
                best, nearest = cosine, first + offset + b
    return best, nearest


@njit_kernel
def nearest_all(stored, starts, lengths, marked, query_rows, heads, cosines, nearest):
    """Nearest marked entries of all queries, on one thread."""
    firsts = np.cumsum(lengths) - lengths
    for f in range(query_rows.size):
        h = heads[f]
        cosines[f], nearest[f] = nearest_one(
            stored, starts[h], lengths[h], marked, query_rows[f], firsts[h]
        )


@njit_parallel
def nearest_all_parallel(stored, starts, lengths, marked, query_rows, heads, cosines, nearest):
    """`nearest_all` in parallel over entries."""
    firsts = np.cumsum(lengths) - lengths
    for f in numba.prange(query_rows.size):
        h = heads[f]
        cosines[f], nearest[f] = nearest_one(
            stored, starts[h], lengths[h], marked, query_rows[f], firsts[h]
        )
