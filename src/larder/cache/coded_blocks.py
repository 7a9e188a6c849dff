"""Blocks of a transformed tier: rows of its index, and positions as they are written.

    index     head, entries, first position, span, bytes     one row a block

The positions of a block are a bitmap of its span; where that is longer, 4 bytes each (span 0).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, UInt8
from torch import Tensor

INDEX_FIELDS = 5
INDEX_BYTES = 4 * INDEX_FIELDS


class CodedBlock(NamedTuple):
    """Row of the index, and where the block lies.

    Args:
        head: kv head.
        count: entries.
        first: first position.
        span: positions from the first to the last entry; 0 where positions are written out.
        codes: bytes of the payload.
        entries: indices in the tier.
    """

    head: int
    count: int
    first: int
    span: int
    codes: slice
    entries: slice


def blocks_of(index: Int32[Tensor, "B F"]) -> list[CodedBlock]:
    """Blocks of an index, in order."""
    found, start, entry = list[CodedBlock](), 0, 0
    for head, count, first, span, size in index.tolist():
        places = slice(start, start + size), slice(entry, entry + count)
        found.append(CodedBlock(head, count, first, span, *places))
        start, entry = start + size, entry + count
    return found


def packed_positions(positions: Int[np.ndarray, " N"]) -> tuple[int, UInt8[np.ndarray, " B"]]:
    """Span and bytes of ascending positions."""
    span = int(positions[-1] - positions[0]) + 1
    if -(-span // 8) > 4 * len(positions):
        return 0, positions.astype(np.int32).view(np.uint8)
    marks = np.zeros(span, np.uint8)
    marks[positions - positions[0]] = 1
    return span, np.packbits(marks)


def position_bytes(count: int, span: int) -> int:
    """Bytes of the positions of a block."""
    return -(-span // 8) if span else 4 * count


def unpacked_positions(
    places: UInt8[np.ndarray, " B"], count: int, first: int, span: int
) -> Int[np.ndarray, " N"]:
    """Positions of `packed_positions`."""
    if not span:
        return places.copy().view(np.int32)[:count].astype(np.int64)
    return np.flatnonzero(np.unpackbits(places, count=span)).astype(np.int64) + first
