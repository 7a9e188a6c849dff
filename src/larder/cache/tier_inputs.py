"""Inputs of attention over coded entries that follow from a tier, kept for the tiers read last.

A tier is immutable, but holds none of them: they would count against its budget. What is kept here
belongs to the process, and is bounded whatever the number of caches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import is_
from threading import Lock
from typing import NamedTuple
from weakref import ref

from jaxtyping import Float, Int32, Int64
from torch import Tensor

MOST_TIERS = 512  # of some 5 KB each

_kept: OrderedDict[int, tuple[list[ref[Tensor]], float, KernelInputs]] = OrderedDict()
_kept_lock = Lock()
NOTHING: tuple[list[ref[Tensor]], float, None] = ([], 0.0, None)


class KernelInputs(NamedTuple):
    """Inputs of the compiled kernel.

    Args:
        blocks: fields of each block, as `transform_attention` takes them.
        means: of keys before rotation, and of values.
        classes: class of each component in tier 0, keys first.
        length: positions up to the last one that is coded.
    """

    blocks: Int64[Tensor, "B F"]
    means: Float[Tensor, "2 K D"]
    classes: Int32[Tensor, "K D2"]
    length: int


def kernel_inputs(
    tensors: Sequence[Tensor], step: float, build: Callable[[], KernelInputs]
) -> KernelInputs:
    """Inputs of a tier, made once while it is among the tiers read last. Thread-safe.

    Args:
        tensors: of the tier, all that the inputs follow from; they are not kept alive.
        step: its quantization step.
    """
    key = id(tensors[0])
    with _kept_lock:
        refs, own_step, found = _kept.get(key, NOTHING)
        present = [each() for each in refs]
        if found is not None and own_step == step and all(map(is_, present, tensors)):
            _kept.move_to_end(key)
            return found
    made = build()
    with _kept_lock:
        _kept[key] = list(map(ref, tensors)), step, made
        _kept.move_to_end(key)
        while len(_kept) > MOST_TIERS:
            _kept.popitem(last=False)
    return made
