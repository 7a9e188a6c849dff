"""Tensors that an object holds, that operations return, and that a call allocates."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

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


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that operations returned while it was on.

    Args:
        apart: tensors whose storage does not count.
    """

    nbytes = 0

    def __init__(self, apart: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._apart = {tensor.untyped_storage().data_ptr() for tensor in apart}

    @property
    def numbers(self) -> int:
        """Numbers in float32 that it holds."""
        return self.nbytes // 4

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._apart:
                    self.nbytes = max(self.nbytes, storage.nbytes())
        return result


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the memory behind tensors, each piece counted once."""
    pieces = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for pointer, size in pieces.items() if pointer)


def peak_bytes(call: Callable[[], object]) -> int:
    """Largest sum of bytes allocated during a call and not freed yet, activations included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    recorded: Any = profiler.profiler  # torch types it as optional, and its events without bytes
    events = recorded.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
