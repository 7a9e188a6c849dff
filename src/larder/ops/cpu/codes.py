"""Sums over codes on a CPU: the tables of a kv head stay in the first-level cache."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from larder.ops.cpu.decode_attention import num_threads_for


def supports_codes(codes: Tensor) -> bool:
    """Whether the kernel takes this call: contiguous CPU storage."""
    return codes.device.type == "cpu" and codes.is_contiguous()


def pq_products(
    tables: Float[Tensor, "K R V N"], codes: UInt8[Tensor, "K V C"], length: int
) -> Float[Tensor, "K R S"]:
    """Safe from several threads at once."""
    from larder.ops.cpu import codes_kernels as kernels  # compiles: not before it is needed

    heads, group, parts, _ = tables.shape
    sums = np.empty((heads, group, length), np.float32)
    threads = num_threads_for(heads * group * parts * length)
    look_up = kernels.sum_codes_parallel if threads > 1 else kernels.sum_codes
    look_up(tables.float().contiguous().numpy(), codes.numpy(), sums)
    return torch.from_numpy(sums)
