"""Copies from host memory to a device that do not wait for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def copy_to_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """Tensor of a numpy array on a device.

    On a GPU the copy is queued behind what runs there, from pinned memory, which torch holds until
    it is done; a copy from other memory makes the host wait. On a CPU the tensor is a copy too.
    """
    host = torch.from_numpy(numbers)
    if device.type != "cuda":
        return host.to(device, copy=True)
    return host.pin_memory().to(device, non_blocking=True)


def device_tensor(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 tensor of some numbers on a device; see `copy_to_device`."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    return copy_to_device(np.array(numbers, np.int64), device)


def write_to_device(target: Tensor, numbers: NDArray[Any]) -> None:
    """Write a numpy array into a tensor on a device in place; see `copy_to_device`."""
    host = torch.from_numpy(numbers)
    if target.device.type == "cuda":
        host = host.pin_memory()
    target.copy_(host, non_blocking=True)
