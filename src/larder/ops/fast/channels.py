"""Products over few channels on a CPU: each picked row is read once, at the speed of memory."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.ops.fast.decode import STORED, readable_by_numba, threads_worth_waking


def serves(tables: Tensor) -> bool:
    """Whether the kernel takes this call: contiguous CPU storage."""
    return tables.device.type == "cpu" and tables.dtype in STORED and tables.is_contiguous()


def channel_products(
    tables: Float[Tensor, "K X C"],
    picks: Int64[Tensor, "K R N"],
    weights: Float[Tensor, "K R N"],
    length: int,
) -> Float[Tensor, "K R S"]:
    """Safe from several threads at once."""
    from larder.ops.fast import channels_kernels as kernels  # compiles: not before it is needed

    heads, group, count = picks.shape
    sums = np.empty((heads, group, length), np.float32)
    threads = threads_worth_waking(heads * group * count * length)
    add_up = kernels.add_up_in_parallel if threads > 1 else kernels.add_up
    add_up(
        readable_by_numba(tables.detach()),
        picks.contiguous().numpy(),
        weights.float().contiguous().numpy(),
        sums,
    )
    return torch.from_numpy(sums)
