"""Means over heads in host memory: one reading of numbers and positions."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor


def supports_layer_mean(numbers: Tensor, positions: Tensor) -> bool:
    """Whether the kernel takes this call: float32 and int32 in host memory."""
    return (
        numbers.device.type == "cpu"
        and numbers.dtype is torch.float32
        and positions.dtype is torch.int32
    )


def layer_mean(
    numbers: Float[Tensor, "R C"],
    positions: Int[Tensor, " C"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
) -> Float[Tensor, " S"] | None:
    """As `readable_layer_mean`; sums are in another order."""
    from larder.ops.cpu import layer_means_kernels as kernels  # compiles: not before it is needed

    mean = torch.zeros(int(lengths[0]))
    told = numbers.detach().contiguous().numpy(), positions.contiguous().numpy()
    alike = kernels.mean_if_same_positions(*told, starts.numpy(), lengths.numpy(), mean.numpy())
    return mean if alike else None
