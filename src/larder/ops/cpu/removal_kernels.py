"""Numba kernels of row removal, compiled at their first call.

Only `larder.ops.cpu.removal` imports this module, when it calls a kernel. A storage is an address
and the bytes of a row, so that one kernel serves every dtype and number of storages.
"""

from __future__ import annotations

from typing import Any

import numba
from numba.core import cgutils
from numba.extending import intrinsic

from larder.ops.cpu.decode_attention_kernels import njit_kernel, njit_parallel


def memmove(typing, target, source, count):
    """C's memmove between two addresses; an assignment of overlapping slices would copy twice."""

    def build(context, builder, signature, arguments):
        to, origin, size = arguments
        to, origin = (builder.inttoptr(address, cgutils.voidptr_t) for address in (to, origin))
        cgutils.raw_memmove(builder, to, origin, size, 1)
        return context.get_dummy_value()

    return numba.void(numba.int64, numba.int64, numba.int64), build


move_bytes: Any = intrinsic(memmove)


@njit_kernel
def are_misplaced(own, offset, length):
    """True if entries do not ascend within [offset, offset + length)."""
    astray = 0
    for i in range(1, own.size):
        astray += own[i] <= own[i - 1]
    if own.size:
        astray += (own[0] < offset) + (own[own.size - 1] >= offset + length)
    return astray > 0


@njit_kernel
def check_kept(kept, starts, new_starts, lengths, new_lengths):
    """First head with invalid kept entries, or -1; and the number of rows to move."""
    rows = 0
    first = 0
    offset = 0
    for h in range(lengths.size):
        own = kept[first : first + new_lengths[h]]
        still = 0
        shift = offset + new_starts[h] - starts[h]
        for i in range(own.size):
            still += own[i] == i + shift
        if are_misplaced(own, offset, lengths[h]):
            return h, 0
        rows += own.size - still
        first += new_lengths[h]
        offset += lengths[h]
    return -1, rows


@njit_kernel
def move_run(addresses, row_bytes, target, source, count):
    """Move some rows of every storage."""
    for m in range(addresses.size):
        to = addresses[m] + target * row_bytes[m]
        move_bytes(to, addresses[m] + source * row_bytes[m], count * row_bytes[m])


@njit_kernel
def move_head(addresses, row_bytes, start, new_start, offset, own):
    """Move each run of kept rows: first those that move down, in reverse; then those that move up.

    The shift grows along the rows with the number of removed rows before them, so all rows that
    move down come before all that move up.
    """
    ahead = start - offset - new_start  # a row i goes from own[i] + ahead to i, counted from there
    split = 0
    while split < own.size and own[split] + ahead < split:
        split += 1
    stop = split
    while stop > 0:
        i = stop - 1
        shift = own[i] + ahead - i
        while i > 0 and own[i - 1] + ahead - (i - 1) == shift:
            i -= 1
        move_run(addresses, row_bytes, new_start + i, new_start + i + shift, stop - i)
        stop = i
    i = split
    while i < own.size:
        shift = own[i] + ahead - i
        stop = i + 1
        while stop < own.size and own[stop] + ahead - stop == shift:
            stop += 1
        if shift > 0:
            move_run(addresses, row_bytes, new_start + i, new_start + i + shift, stop - i)
        i = stop


@njit_kernel
def count_shifted_below(own, offset, shift):
    """Number of a head's kept entries that lie less than `shift` rows behind their new places."""
    low, high = 0, own.size
    while low < high:
        middle = (low + high) // 2
        if own[middle] - offset - middle < shift:
            low = middle + 1
        else:
            high = middle
    return low


@njit_kernel
def plan_removal(kept, starts, lengths, new_lengths, edges, roomy, new_starts):
    """Plan that moves the front of a head down where that moves fewer rows than its end.

    Returns the first head with invalid kept entries, or -1; the least slack behind a head; and the
    number of rows to move.
    """
    first = 0
    offset = 0
    moved = 0
    least = edges[lengths.size]
    for h in range(lengths.size):
        held = new_lengths[h]
        gone = lengths[h] - held
        own = kept[first : first + held]
        if are_misplaced(own, offset, lengths[h]):
            return h, 0, 0
        # The distance of an entry to its place among the kept ones never decreases along a head.
        front = count_shifted_below(own, offset, 1)  # rows that need not move if the end moves up
        still = held - count_shifted_below(own, offset, gone)  # and if the front goes down
        new_starts[h] = starts[h]
        if edges[h + 1] - edges[h] - held >= roomy and still > front:
            new_starts[h] += gone
            front = still
        moved += held - front
        least = min(least, edges[h + 1] - new_starts[h] - held)
        first += held
        offset += lengths[h]
    return -1, least, moved


@njit_kernel
def move_share(addresses, row_bytes, kept, starts, new_starts, lengths, new_lengths, share, shares):
    """Move every `shares`-th head, from head `share` on."""
    first = 0
    offset = 0
    for h in range(lengths.size):
        if h % shares == share:
            own = kept[first : first + new_lengths[h]]
            move_head(addresses, row_bytes, starts[h], new_starts[h], offset, own)
        first += new_lengths[h]
        offset += lengths[h]


@njit_kernel
def move_serially(addresses, row_bytes, kept, starts, new_starts, lengths, new_lengths, shares):
    """Removal on one thread, all heads in turn."""
    for s in range(shares):
        move_share(addresses, row_bytes, kept, starts, new_starts, lengths, new_lengths, s, shares)


@njit_parallel
def move_in_parallel(addresses, row_bytes, kept, starts, new_starts, lengths, new_lengths, shares):
    """Removal by threads, a share of the heads each; their regions do not overlap."""
    for s in numba.prange(shares):
        move_share(addresses, row_bytes, kept, starts, new_starts, lengths, new_lengths, s, shares)
