"""What an object really holds: every tensor that can be reached from it."""

from __future__ import annotations

import gc
import types
from typing import Any

import torch
from torch import Tensor

from larder.cache import LowRankMaps, TransformTables

# Classes and modules lead to the whole interpreter; tensors lead to their own insides. The tables
# of a calibrated model are shared by its caches, whose bytes do not include them.
_BORDERS = (
    *(type, types.ModuleType, types.FunctionType, Tensor, torch.dtype, torch.device),
    *(LowRankMaps, TransformTables),
)


def reachable_tensors(root: Any) -> list[Tensor]:
    """Tensors found by following references, however they are hidden."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    queue = [root]
    while queue:
        thing = queue.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found[id(thing)] = thing
        if not isinstance(thing, _BORDERS):
            queue += gc.get_referents(thing)
    return list(found.values())


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the memory behind tensors, each piece counted once."""
    pieces = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for pointer, size in pieces.items() if pointer)
