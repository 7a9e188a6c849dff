"""Nearest rows on a CPU for a few rows at a time: one reading of each head's storage, no copies."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from larder.ops.cpu.decode_attention import SUPPORTED_DTYPES, as_numpy, num_threads_for

MAX_NEAREST_ROWS = 4  # per kv head; from there on a matrix product is faster


def supports_nearest(rows: Tensor, asked: int, num_kv_heads: int) -> bool:
    """Whether the kernel takes this call: few rows over contiguous CPU storage."""
    return (
        rows.device.type == "cpu"
        and rows.dtype in SUPPORTED_DTYPES
        and asked <= MAX_NEAREST_ROWS * num_kv_heads
        and rows.is_contiguous()
    )


def nearest_rows(
    rows: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    marked: Bool[Tensor, " T"],
    asked: Int64[Tensor, " F"],
) -> tuple[Float[Tensor, " F"], Int64[Tensor, " F"]]:
    """Safe from several threads at once."""
    from larder.ops.cpu import nearest_kernels as kernels  # compiles: not before it is needed

    owned, marks = lengths.numpy(), marked.numpy()
    heads = np.searchsorted(np.cumsum(owned), asked.numpy(), side="right")
    cosines = np.empty(len(asked), np.float32)
    places = np.empty(len(asked), np.int64)
    threads = num_threads_for(2 * int(owned[heads].sum()) * rows.shape[1])
    search = kernels.nearest_all_parallel if threads > 1 and len(asked) > 1 else kernels.nearest_all
    search(
        as_numpy(rows.detach()),
        starts.numpy(),
        owned,
        marks,
        asked.numpy(),
        heads,
        cosines,
        places,
    )
    return torch.from_numpy(cosines), torch.from_numpy(places)
