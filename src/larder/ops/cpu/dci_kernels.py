"""Numba kernels of search in a tree of keys, compiled at their first call.

Only `larder.ops.cpu.dci` imports this module. A tree is a tuple of arrays for all heads:

    pages   members [T, S], fills, versions, nexts, lows, tiers [T]
    cells   firsts, centers, scales [U], means [U, D]

Page p of head h has row bases[0, h] + p, its cell c row bases[1, h] + c.

A cell is the list of pages below one entry; cell 0 is the root. Members of pages on level 0 are
entries, those on higher levels are cells, whose entries are in `centers`. Pages of a cell are
linked by `nexts`, ordered by the entries' projections; `lows` is the smallest of a page. The mean
of all entries below a cell, its own included, is `scales` times int8 `means`; without means [U, 0],
the score of a cell is that of its entry.
"""

from __future__ import annotations

import numba
import numpy as np
from numba.extending import overload

from larder.ops.cpu.decode_attention_kernels import njit_kernel, njit_parallel
from larder.ops.cpu.search_kernels import insert_ranked

AT_ONCE = 4  # rows multiplied at a time, with their sums in registers


def load_key(stored, row, scratch):
    """Stored row as float32."""
    raise NotImplementedError("only kernels call this; numba picks the form by the stored type")


@overload(load_key)
def _key_by_dtype(stored, row, scratch):
    return load_float32_key if stored.dtype == numba.float32 else load_bfloat16_key


def load_float32_key(stored, row, scratch):
    return stored[row]


def load_bfloat16_key(stored, row, scratch):
    """Row widened from bfloat16, the upper half of a float32."""
    bits = scratch.view(np.uint32)
    for d in range(stored.shape[1]):
        bits[d] = np.uint32(stored[row, d]) << np.uint32(16)
    return scratch


@njit_kernel
def products(query, stored, rows, count, scratch, dots):
    """Products of a query with stored rows; `rows` is padded to a multiple of 4."""
    for at in range(count, (count + AT_ONCE - 1) // AT_ONCE * AT_ONCE):
        rows[at] = rows[count - 1]
    for at in range(0, count, AT_ONCE):
        k0 = load_key(stored, rows[at], scratch[0])
        k1 = load_key(stored, rows[at + 1], scratch[1])
        k2 = load_key(stored, rows[at + 2], scratch[2])
        k3 = load_key(stored, rows[at + 3], scratch[3])
        s0 = s1 = s2 = s3 = np.float32(0.0)
        for d in range(query.size):
            number = query[d]
            s0 += number * k0[d]
            s1 += number * k1[d]
            s2 += number * k2[d]
            s3 += number * k3[d]
        dots[at], dots[at + 1], dots[at + 2], dots[at + 3] = s0, s1, s2, s3


@njit_kernel
def cell_score(query, product, mean, scale):
    """Score of a cell: the product with its mean, or with its entry if there are no means."""
    if mean.size == 0:
        return product
    total = np.float32(0.0)
    for d in range(query.size):
        total += query[d] * np.float32(mean[d])
    return total * scale


@njit_kernel
def rows_of_page(members, fill, start, centers, level, rows):
    """Storage rows of the keys of a page."""
    for slot in range(fill):
        rows[slot] = start + (centers[members[slot]] if level > 0 else members[slot])


@njit_kernel
def allocate(page, head_dim):
    """Buffers for rows, their products, and float32 copies of a few of them."""
    width = (page + AT_ONCE - 1) // AT_ONCE * AT_ONCE
    return (
        np.empty(width, np.int64),
        np.empty(width, np.float32),
        np.empty((AT_ONCE, head_dim), np.float32),
    )


@njit_kernel
def search_one(query, stored, start, pages, cells, levels, beam, ranked):
    """Rank the pages for one query by their best entry; returns the number of keys compared.

    On every level the members of the `beam` best cells are compared.
    """
    members, fills, nexts = pages
    firsts, centers, scales, means = cells
    width = max(min(beam, firsts.size), 1)
    chosen, coming = np.zeros(width, np.int64), np.zeros(width, np.int64)
    values = np.empty(width, np.float32)
    bests = np.empty(ranked.size, np.float32)
    rows, dots, scratch = allocate(members.shape[1], query.size)
    held, seen, wide = 0, 0, 1
    for level in range(levels - 1, -1, -1):
        found = 0
        for b in range(wide):
            page = firsts[chosen[b]]
            while page >= 0:
                fill = fills[page]
                rows_of_page(members[page], fill, start, centers, level, rows)
                products(query, stored, rows, fill, scratch, dots)
                best = np.float32(-np.inf)
                for slot in range(fill):
                    best = max(best, dots[slot])
                    if level > 0:
                        cell = members[page, slot]
                        promise = cell_score(query, dots[slot], means[cell], scales[cell])
                        found = insert_ranked(promise, cell, values, coming, found)
                held = insert_ranked(best, page, bests, ranked, held)
                seen += fill
                page = nexts[page]
        chosen, coming = coming, chosen
        wide = found
    return seen


@njit_kernel
def search(queries, stored, starts, tree, bases, levels, beams, ranked, seen):
    """Search of the queries [H, D] of all heads in one thread."""
    group = len(queries) // len(starts)
    for q in range(len(queries)):
        search_head(
            q, q // group, queries, stored, starts, tree, bases, levels, beams, ranked, seen
        )


@njit_parallel
def search_in_parallel(queries, stored, starts, tree, bases, levels, beams, ranked, seen):
    """`search` in parallel over queries."""
    group = len(queries) // len(starts)
    for q in numba.prange(len(queries)):
        search_head(
            q, q // group, queries, stored, starts, tree, bases, levels, beams, ranked, seen
        )


@njit_kernel
def tree_of_head(tree, bases, h):
    """Pages and cells of one head."""
    members, fills, versions, nexts, lows, tiers, firsts, centers, scales, means = tree
    low, high = bases[0, h], bases[0, h + 1]
    pages = (
        members[low:high],
        fills[low:high],
        versions[low:high],
        nexts[low:high],
        lows[low:high],
        tiers[low:high],
    )
    low, high = bases[1, h], bases[1, h + 1]
    return pages, (firsts[low:high], centers[low:high], scales[low:high], means[low:high])


@njit_kernel
def search_head(q, h, queries, stored, starts, tree, bases, levels, beams, ranked, seen):
    """Search of one query in the tree of its head."""
    pages, cells = tree_of_head(tree, bases, h)
    searched = pages[0], pages[1], pages[3]
    seen[q] = search_one(
        queries[q], stored, starts[h], searched, cells, levels[h], beams[h], ranked[q]
    )
