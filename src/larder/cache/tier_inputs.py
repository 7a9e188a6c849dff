"""Calls of attention over coded entries, kept for the tiers read last.

A tier is immutable, but holds no tensor that follows from it: that would count against its budget.
What is kept here belongs to the process, and is bounded whatever the number of caches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import is_
from threading import Lock
from weakref import ref

from torch import Tensor

from larder.ops.cpu.transform_attention import CodedEntriesCall

MOST_TIERS = 512  # of some 5 KB each
NOTHING: tuple[list[ref[Tensor]], tuple[object, ...], None] = ([], (), None)

_kept: OrderedDict[int, tuple[list[ref[Tensor]], tuple[object, ...], CodedEntriesCall]] = (
    OrderedDict()
)
_kept_lock = Lock()


def kept_call(
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
