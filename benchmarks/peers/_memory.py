"""Memory actually held: bytes of tensor storage behind any object, and memory of this process.

It needs torch and nothing of Larder, because peers run in environments without it.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Types without entries of their own, or that refer to everything.
OPAQUE = (str, bytes, int, float, type, nn.Module, ModuleType, FunctionType, MethodType)
RESET_PEAK = "5"  # written to CLEAR to reset the peak resident size


def held_bytes(*roots: Any) -> int:
    """Bytes of all reachable tensors: each storage is counted once and completely, however it is
    viewed.

    Modules are skipped: tensors of a module other than weights must be given as roots.
    """
    storages = {}
    for tensor in _tensors(roots):
        storage = tensor.untyped_storage()
        if tensor.device.type != "meta":
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def masked_entries(model: nn.Module) -> tuple[int, list[Any]]:
    """Number of entries that kvpress masks in attention without freeing them, and its index
    tensors.
    """
    noted = [vars(module).get("masked_key_indices") for module in model.modules()]
    indices = [each for each in noted if each is not None]
    return sum(len(each[0]) for each in indices), indices


class PeakMemory:
    """Peak memory from now on; of the accelerator if there is one."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            self._resets = _reset()
            self._before = _resident("VmRSS")

    def figures(self) -> dict[str, int]:
        """Peak memory, and its increase since the start."""
        if self._cuda:
            highest = torch.cuda.max_memory_allocated()
        else:
            highest = _resident("VmHWM") if self._resets else _peak_resident()
        return {"process_peak_bytes": highest, "working_peak_bytes": highest - self._before}


def _tensors(roots: Any) -> Iterator[Tensor]:
    """All reachable tensors, breadth first; wrapper tensors yield their inner ones."""
    waiting, known = list(roots), set[int]()
    while waiting:
        thing = waiting.pop()
        if id(thing) in known or isinstance(thing, OPAQUE):
            continue
        known.add(id(thing))
        if isinstance(thing, Tensor):
            inner = _wrapped(thing)
            if not inner:
                yield thing
            waiting += inner
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, list | tuple | set | frozenset):
            waiting += thing
        else:
            waiting += _fields(thing)


def _wrapped(tensor: Tensor) -> list[Any]:
    """Inner tensors of a packed tensor; empty for a plain one."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return []
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore
    return [getattr(tensor, name) for name in names]


def _fields(thing: Any) -> list[Any]:
    values = list(getattr(thing, "__dict__", {}).values())
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return values + [getattr(thing, name) for name in slots if hasattr(thing, name)]


def _reset() -> bool:
    """Reset the peak resident size; return whether the system allows it."""
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def _resident(name: str) -> int:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return _peak_resident()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def _peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
