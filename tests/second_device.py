"""Second device that is no device: tensors of the CPU that say where they are.

Inside the context, tensors that are made on `OTHER` or moved there report it as their device. What
they are computed with must be on the same device, as on a machine with several; numbers without
dimensions may come from anywhere. Kernels and host reads are those of the CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU, OTHER = torch.device("cpu"), torch.device("xpu", 0)
DEVICE = Tensor.device.__get__  # pyright: ignore
# Moves, and copies between devices.
MOVING = {"to", "cpu", "copy_"}
# Calls whose indices may be on the CPU.
INDEXING = {"__getitem__", "__setitem__"}


class SecondDevice(TorchFunctionMode):
    """Context in which `OTHER` exists."""

    def __init__(self) -> None:
        super().__init__()
        self._moved = weakref.WeakKeyDictionary[Any, bool]()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func == DEVICE:
            return self.device_of(args[0])
        name = getattr(func, "__name__", "")
        target, args, given = self._target(name, args, given)
        sources = [own for own in _tensors((args, given)) if own.dim() or name in MOVING]
        found = {self.device_of(own) for own in sources}
        if name in INDEXING and self.device_of(args[0]) == OTHER:
            found.discard(CPU)
        if name not in MOVING and len(found) > 1:
            raise RuntimeError(f"{name} of tensors on several devices: {sorted(map(str, found))}")
        if name == "to" and target is not None and found == {target} and not given.get("copy"):
            same = func(*args, **given)
            return self._placed(same, target)
        out = func(*args, **given)
        if name == "copy_":
            return out
        place = target or (found.pop() if found else CPU)
        if name in ("to", "cpu") and place != self.device_of(args[0]):
            out = out.clone() if out is args[0] or out.data_ptr() == args[0].data_ptr() else out
        return self._placed(out, place)

    def device_of(self, tensor: Tensor) -> torch.device:
        """Device that a tensor says it is on."""
        return OTHER if _key(tensor) in self._moved else DEVICE(tensor)

    def put(self, module: torch.nn.Module) -> None:
        """Have the weights and buffers of a module on the other device."""
        for own in (*module.parameters(), *module.buffers()):
            self._placed(own, OTHER)

    def _target(
        self, name: str, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[torch.device | None, tuple[Any, ...], dict[str, Any]]:
        """Device that a call names, and the call on the CPU."""
        named = [own for own in (*args[:2], given.get("device")) if _is_device(own)]
        if name == "cpu":
            return CPU, args, given
        like = [own for own in args[1:] if isinstance(own, Tensor)] if name == "to" else []
        if like:
            named.append(self.device_of(like[0]))
        if not named:
            return None, args, given
        given = {k: CPU if k == "device" and v is not None else v for k, v in given.items()}
        args = tuple(CPU if _is_device(own) else own for own in args)
        place: Any = named[0]
        return torch.device(place), args, given

    def _placed(self, out: Any, place: torch.device) -> Any:
        for own in _tensors(out):
            if place == OTHER:
                self._moved[_key(own)] = True
            else:
                self._moved.pop(_key(own), None)
        return out


def _key(tensor: Tensor) -> Any:
    """Object of a tensor that lives as long as its memory."""
    return tensor.untyped_storage()


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or value in ("cpu", "xpu", "xpu:0")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for own in value:
            yield from _tensors(own)
