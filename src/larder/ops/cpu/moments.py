"""Moments in host memory: one reading of the columns."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor


def supports(numbers: Tensor) -> bool:
    """Whether the kernel takes this call: float32 in host memory."""
    return numbers.device.type == "cpu" and numbers.dtype is torch.float32


def added_moments(
    count: Float[Tensor, " S"],
    mean: Float[Tensor, " S"],
    spread: Float[Tensor, " S"],
    numbers: Float[Tensor, " S"],
    counted: Bool[Tensor, " S"],
) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"], Float[Tensor, " S"]]:
    """Safe from several threads at once."""
    from larder.ops.cpu import moments_kernels as kernels  # compiles: not before it is needed

    joined = torch.empty(3, len(numbers))
    told = (part.detach().contiguous().numpy() for part in (count, mean, spread, numbers, counted))
    kernels.add_moments(*told, joined.numpy())
    total, average, around = joined
    return total, average, around


def variance_boosted_means(
    count: Float[Tensor, " C"],
    mean: Float[Tensor, " C"],
    spread: Float[Tensor, " C"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
    share: float,
) -> Float[Tensor, " T"]:
    """The same bits as `readable_raised_means`."""
    from larder.ops.cpu import moments_kernels as kernels

    raised = torch.empty(int(lengths.sum()))
    moments = (part.detach().contiguous().numpy() for part in (count, mean, spread))
    kernels.boost_most_varied(*moments, starts.numpy(), lengths.numpy(), share, raised.numpy())
    return raised


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
    from larder.ops.cpu import moments_kernels as kernels  # compiles: not before it is needed

    mean = torch.zeros(int(lengths[0]))
    told = numbers.detach().contiguous().numpy(), positions.contiguous().numpy()
    alike = kernels.mean_if_same_positions(*told, starts.numpy(), lengths.numpy(), mean.numpy())
    return mean if alike else None
