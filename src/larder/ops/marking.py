"""Marks over packed entries, made by numpy where these lie in host memory.

They are no more than a comparison or two, which torch takes several times as long for: in a decode
step every layer asks for them anew.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor


def mask_outside(positions: Int[Tensor, " T"], first: int, stop: int) -> Bool[Tensor, " T"]:
    """Marks what lies before `first`, or at `stop` and later."""
    if positions.device.type != "cpu":
        return (positions < first) | (positions >= stop)
    numbers = positions.numpy()
    marks = numbers >= stop
    if first > 0:
        np.logical_or(marks, numbers < first, out=marks)
    return torch.from_numpy(marks)


def mask_until(positions: Int[Tensor, " T"], last: int) -> Bool[Tensor, " T"]:
    """Marks what lies at `last` or before."""
    if positions.device.type != "cpu":
        return positions <= last
    return torch.from_numpy(positions.numpy() <= last)


def mask_of(chosen: Int64[Tensor, " N"], size: int) -> Bool[Tensor, " T"]:
    """Marks the chosen of `size` entries."""
    if chosen.device.type != "cpu":
        return torch.zeros(size, dtype=torch.bool, device=chosen.device).index_fill(0, chosen, 1)
    marks = np.zeros(size, np.bool_)
    marks[chosen.numpy()] = True
    return torch.from_numpy(marks)


def unmasked_indices(marks: Bool[Tensor, " T"]) -> Int64[Tensor, " N"]:
    """The entries that are not marked, ascending."""
    if marks.device.type != "cpu":
        return torch.nonzero(~marks).flatten()
    return torch.from_numpy(np.flatnonzero(~marks.numpy()))


def sorted_places(wanted: Int64[Tensor, " N"], held: Int64[Tensor, " T"]) -> Int64[Tensor, " N"]:
    """Where each number stands, or would stand, in an ascending row."""
    if held.device.type != "cpu":
        return torch.searchsorted(held, wanted)
    return torch.from_numpy(np.searchsorted(held.numpy(), wanted.numpy()))


def are_in_range(numbers: Int64[Tensor, " N"], stop: int) -> bool:
    """Whether all lie in [0, stop)."""
    if not len(numbers):
        return True
    if numbers.device.type != "cpu":
        return int(numbers.amin()) >= 0 and int(numbers.amax()) < stop
    found = numbers.numpy()
    return bool(found.min() >= 0 and found.max() < stop)


def is_in_sorted(wanted: Int64[Tensor, " N"], held: Int64[Tensor, " T"]) -> Bool[Tensor, " N"]:
    """Which numbers an ascending row holds."""
    if not len(held):
        return torch.zeros_like(wanted, dtype=torch.bool)
    if held.device.type != "cpu":
        return held[torch.searchsorted(held, wanted).clamp(max=len(held) - 1)] == wanted
    row, numbers = held.numpy(), wanted.numpy()
    places = np.minimum(np.searchsorted(row, numbers), len(row) - 1)
    return torch.from_numpy(row[places] == numbers)
