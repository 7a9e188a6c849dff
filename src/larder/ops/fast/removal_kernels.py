"""The inner loops of removing rows, compiled by numba at their first call.

Only `larder.ops.fast.removal` imports this module, and only when it is about to remove. A storage
is an address and the bytes of a row, so that one kernel serves every type and number of them.
"""

from __future__ import annotations

from typing import Any

import numba
from numba.core import cgutils
from numba.extending import intrinsic

from larder.ops.fast.decode_kernels import compiled, compiled_parallel


def memmove(typing, target, source, count):
    """C's memmove between two addresses; an assignment of overlapping slices would copy twice."""

    def build(context, builder, signature, arguments):
        to, origin, size = arguments
        to, origin = (builder.inttoptr(address, cgutils.voidptr_t) for address in (to, origin))
        cgutils.raw_memmove(builder, to, origin, size, 1)
        return context.get_dummy_value()

    return numba.void(numba.int64, numba.int64, numba.int64), build


move_bytes: Any = intrinsic(memmove)


@compiled
def examine(kept, lengths, new_lengths):
    """The first head whose kept entries are not its own, ascending, or -1; and the rows to move."""
    rows = 0
    first = 0
    offset = 0
    for h in range(lengths.size):
        last = offset - 1
        still = 0
        for i in range(new_lengths[h]):
            entry = kept[first + i]
            if entry <= last or entry >= offset + lengths[h]:
                return h, 0
            if entry == offset + i:
                still += 1
            last = entry
        rows += new_lengths[h] - still
        first += new_lengths[h]
        offset += lengths[h]
    return -1, rows


@compiled
def move_head(addresses, row_bytes, start, offset, own):
    """Move each run of kept rows that something was removed before, the first run first."""
    i = 0
    while i < own.size:
        shift = own[i] - offset - i
        stop = i + 1
        while stop < own.size and own[stop] - offset - stop == shift:
            stop += 1
        if shift > 0:
            for m in range(addresses.size):
                target = addresses[m] + (start + i) * row_bytes[m]
                move_bytes(target, target + shift * row_bytes[m], (stop - i) * row_bytes[m])
        i = stop


@compiled
def move_share(addresses, row_bytes, kept, starts, lengths, new_lengths, share, shares):
    """Every `shares`-th head, from head `share` on."""
    first = 0
    offset = 0
    for h in range(lengths.size):
        if h % shares == share:
            own = kept[first : first + new_lengths[h]]
            move_head(addresses, row_bytes, starts[h], offset, own)
        first += new_lengths[h]
        offset += lengths[h]


@compiled
def move_serially(addresses, row_bytes, kept, starts, lengths, new_lengths, shares):
    """All heads, one after the other."""
    for s in range(shares):
        move_share(addresses, row_bytes, kept, starts, lengths, new_lengths, s, shares)


@compiled_parallel
def move_in_parallel(addresses, row_bytes, kept, starts, lengths, new_lengths, shares):
    """One share of the heads per thread; their regions do not overlap."""
    for s in numba.prange(shares):
        move_share(addresses, row_bytes, kept, starts, lengths, new_lengths, s, shares)
