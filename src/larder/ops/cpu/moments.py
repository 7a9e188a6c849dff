"""Running moments on a CPU, in one pass over the columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor


def supports(numbers: Tensor) -> bool:
    """True for float32 in host memory."""
    return numbers.device.type == "cpu" and numbers.dtype is torch.float32


def added_moments(
    count: Float[Tensor, " S"],
    mean: Float[Tensor, " S"],
    spread: Float[Tensor, " S"],
    numbers: Float[Tensor, " S"],
    counted: Bool[Tensor, " S"],
) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"], Float[Tensor, " S"]]:
    """Kernel of `added_moments`; thread-safe."""
    from larder.ops.cpu import moments_kernels as kernels  # compiles: not before it is needed

    joined = torch.empty(3, len(numbers))
    kernels.add_moments(
        _as_array(count),
        _as_array(mean),
        _as_array(spread),
        _as_array(numbers),
        _as_array(counted),
        joined.numpy(),
    )
    total, average, around = joined
    return total, average, around


def supports_layer_mean(numbers: Tensor, positions: Tensor) -> bool:
    """True for float32 numbers and int32 positions in host memory."""
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
    """Kernel of `layer_mean`; sums are in another order than with torch."""
    from larder.ops.cpu import moments_kernels as kernels  # compiles: not before it is needed

    mean = torch.zeros(int(lengths[0]))
    is_same = kernels.mean_if_same_positions(
        _as_array(numbers), _as_array(positions), starts.numpy(), lengths.numpy(), mean.numpy()
    )
    return mean if is_same else None


def _as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().contiguous().numpy()
