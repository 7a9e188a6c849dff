"""Blocks of a transformed tier: rows of its index, positions as they are written, and calls of
attention over their entries.

    index     head, entries, first position, span, bytes     one row a block

The positions of a block are a bitmap of its span; where that is longer, 4 bytes each (span 0).

A tier is immutable, but holds no tensor that follows from it: that would count against its budget.
Calls over the tiers read last belong to the process, and are bounded whatever the number of caches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import is_
from threading import Lock
from typing import NamedTuple
from weakref import ref

import numpy as np
from jaxtyping import Int, Int32, UInt8
from torch import Tensor

from larder.ops.cpu.transform_attention import CodedEntriesCall

INDEX_FIELDS = 5
INDEX_BYTES = 4 * INDEX_FIELDS
MOST_TIERS = 512  # of some 5 KB each
NOTHING: tuple[list[ref[Tensor]], tuple[object, ...], None] = ([], (), None)
_kept: OrderedDict[int, tuple[list[ref[Tensor]], tuple[object, ...], CodedEntriesCall]] = (
    OrderedDict()
)
_kept_lock = Lock()


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


def cached_call(
    tensors: Sequence[Tensor], options: tuple[object, ...], build: Callable[[], CodedEntriesCall]
) -> CodedEntriesCall:
    """Call over the entries of a tier, made once while it is among the tiers read last.

    Thread-safe.

    Args:
        tensors: of the tier, all that the call follows from; they are not kept alive.
        options: all else that it follows from.
    """
    key = id(tensors[0])
    with _kept_lock:
        refs, own_options, found = _kept.get(key, NOTHING)
        present = [each() for each in refs]
        if found is not None and own_options == options and all(map(is_, present, tensors)):
            _kept.move_to_end(key)
            return found
    made = build()
    with _kept_lock:
        _kept[key] = list(map(ref, tensors)), options, made
        _kept.move_to_end(key)
        while len(_kept) > MOST_TIERS:
            _kept.popitem(last=False)
    return made
