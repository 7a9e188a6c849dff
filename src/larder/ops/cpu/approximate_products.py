"""Approximate query-key products on a CPU; each picked row is read once."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from larder.ops.cpu.decode_attention import SUPPORTED_DTYPES, as_numpy, num_threads_for


def supports_channel_tables(tables: Tensor) -> bool:
    """True for contiguous CPU storage of a supported dtype."""
    return (
        tables.device.type == "cpu" and tables.dtype in SUPPORTED_DTYPES and tables.is_contiguous()
    )


def channel_products(
    tables: Float[Tensor, "K X C"],
    picks: Int64[Tensor, "K R N"],
    weights: Float[Tensor, "K R N"],
    length: int,
) -> Float[Tensor, "K R S"]:
    """Kernel of `channel_products`; thread-safe."""
    from larder.ops.cpu import (
        approximate_products_kernels as kernels,  # compiles: not before it is needed
    )

    heads, group, count = picks.shape
    sums = np.empty((heads, group, length), np.float32)
    threads = num_threads_for(heads * group * count * length)
    add_up = kernels.accumulate_channels_parallel if threads > 1 else kernels.accumulate_channels
    add_up(
        as_numpy(tables.detach()),
        picks.contiguous().numpy(),
        weights.float().contiguous().numpy(),
        sums,
    )
    return torch.from_numpy(sums)


def supports_codes(codes: Tensor) -> bool:
    """True for contiguous CPU storage."""
    return codes.device.type == "cpu" and codes.is_contiguous()


def pq_products(
    tables: Float[Tensor, "K R V N"], codes: UInt8[Tensor, "K V C"], length: int
) -> Float[Tensor, "K R S"]:
    """Kernel of `pq_products`; thread-safe."""
    from larder.ops.cpu import (
        approximate_products_kernels as kernels,  # compiles: not before it is needed
    )

    heads, group, parts, _ = tables.shape
    sums = np.empty((heads, group, length), np.float32)
    threads = num_threads_for(heads * group * parts * length)
    look_up = kernels.sum_codes_parallel if threads > 1 else kernels.sum_codes
    look_up(tables.float().contiguous().numpy(), codes.numpy(), sums)
    return torch.from_numpy(sums)
