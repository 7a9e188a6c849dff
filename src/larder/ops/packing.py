"""Packed tensors: the entries of all heads end to end, without padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor


def starts_of(lengths: Int64[Tensor, " K"]) -> Int64[Tensor, " K"]:
    """Where each head begins, when heads of these lengths lie end to end."""
    return lengths.cumsum(0) - lengths


def storage_rows(
    packed: Int64[Tensor, " N"], starts: Int64[Tensor, " K"], lengths: Int64[Tensor, " K"]
) -> Int64[Tensor, " N"]:
    """Where in the storage packed entries lie; all of them in host memory."""
    wanted, owned = packed.numpy(), lengths.numpy()
    ends = np.cumsum(owned)
    heads = np.searchsorted(ends, wanted, side="right")
    return torch.from_numpy(wanted + (starts.numpy() - ends + owned)[heads])


def heads_of_packed(packed: Int64[Tensor, " N"], lengths: Sequence[int]) -> Int64[Tensor, " N"]:
    """The head of each packed entry, where heads have these lengths."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.searchsorted(np.cumsum(lengths), packed.numpy(), side="right"))
    ends = torch.tensor(lengths, device=packed.device).cumsum(0)
    return torch.searchsorted(ends, packed, right=True)


def packed_rows(starts: Int64[Tensor, " K"], lengths: Int64[Tensor, " K"]) -> Int64[Tensor, " T"]:
    """Where in the storage each packed entry lies."""
    shift = torch.repeat_interleave(starts - starts_of(lengths), lengths)
    return shift + torch.arange(len(shift))
