"""Packed indices: the entries of all heads end to end, without padding, copied to a device.

Copies from host memory do not wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64
from numpy.typing import NDArray
from torch import Tensor


def starts_of(lengths: Int64[Tensor, " K"]) -> Int64[Tensor, " K"]:
    """First packed index of each head."""
    return lengths.cumsum(0) - lengths


def storage_rows(
    packed: Int64[Tensor, " N"], starts: Int64[Tensor, " K"], lengths: Int64[Tensor, " K"]
) -> Int64[Tensor, " N"]:
    """Storage rows of packed entries; all arguments in host memory."""
    wanted, owned = packed.numpy(), lengths.numpy()
    ends = np.cumsum(owned)
    heads = np.searchsorted(ends, wanted, side="right")
    return torch.from_numpy(wanted + (starts.numpy() - ends + owned)[heads])


def heads_of_packed(packed: Int64[Tensor, " N"], lengths: Sequence[int]) -> Int64[Tensor, " N"]:
    """Head of each packed entry."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.searchsorted(np.cumsum(lengths), packed.numpy(), side="right"))
    ends = torch.tensor(lengths, device=packed.device).cumsum(0)
    return torch.searchsorted(ends, packed, right=True)


def packed_rows(starts: Int64[Tensor, " K"], lengths: Int64[Tensor, " K"]) -> Int64[Tensor, " T"]:
    """Storage row of every packed entry."""
    shift = torch.repeat_interleave(starts - starts_of(lengths), lengths)
    return shift + torch.arange(len(shift))


def mask_outside(positions: Int[Tensor, " T"], first: int, stop: int) -> Bool[Tensor, " T"]:
    """Mask of positions outside [first, stop)."""
    if positions.device.type != "cpu":
        return (positions < first) | (positions >= stop)
    numbers = positions.numpy()
    marks = numbers >= stop
    if first > 0:
        np.logical_or(marks, numbers < first, out=marks)
    return torch.from_numpy(marks)


def mask_until(positions: Int[Tensor, " T"], last: int) -> Bool[Tensor, " T"]:
    """Mask of positions up to `last`, inclusive."""
    if positions.device.type != "cpu":
        return positions <= last
    return torch.from_numpy(positions.numpy() <= last)


def mask_of(chosen: Int64[Tensor, " N"], size: int) -> Bool[Tensor, " T"]:
    """Mask of `size` entries that is true at the given indices."""
    if chosen.device.type != "cpu":
        return torch.zeros(size, dtype=torch.bool, device=chosen.device).index_fill(0, chosen, 1)
    marks = np.zeros(size, np.bool_)
    marks[chosen.numpy()] = True
    return torch.from_numpy(marks)


def unmasked_indices(marks: Bool[Tensor, " T"]) -> Int64[Tensor, " N"]:
    """Indices where the mask is false, ascending."""
    if marks.device.type != "cpu":
        return torch.nonzero(~marks).flatten()
    return torch.from_numpy(np.flatnonzero(~marks.numpy()))


def search_sorted(wanted: Int64[Tensor, " N"], numbers: Int64[Tensor, " T"]) -> Int64[Tensor, " N"]:
    """Insertion index of each number in an ascending tensor."""
    if numbers.device.type != "cpu":
        return torch.searchsorted(numbers, wanted)
    return torch.from_numpy(np.searchsorted(numbers.numpy(), wanted.numpy()))


def are_in_range(numbers: Int64[Tensor, " N"], stop: int) -> bool:
    """True if all numbers lie in [0, stop)."""
    if not len(numbers):
        return True
    if numbers.device.type != "cpu":
        return int(numbers.amin()) >= 0 and int(numbers.amax()) < stop
    found = numbers.numpy()
    return bool(found.min() >= 0 and found.max() < stop)


def is_in_sorted(wanted: Int64[Tensor, " N"], numbers: Int64[Tensor, " T"]) -> Bool[Tensor, " N"]:
    """Mask of the wanted numbers that an ascending tensor contains."""
    if not len(numbers):
        return torch.zeros_like(wanted, dtype=torch.bool)
    return numbers[search_sorted(wanted, numbers).clamp(max=len(numbers) - 1)] == wanted


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
