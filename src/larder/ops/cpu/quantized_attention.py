"""Decode attention on a CPU over entries held in few bits: codes are read, never numbers.

Zirui Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (2024),
arXiv:2402.02750, section 3.3: dequantization is fused into the products. Where a group of entries
shares the scales and offsets of its channels,

    q . k = sum over channels of (q x scale) x code, plus q . offset

so both are folded into the query once per group; scales and offsets of values go into the weights
of their entries. Only keys whose entries have scales of their own are turned back, block by block.
Spans are cut over groups instead of entries, otherwise as in `larder.ops.cpu.decode_attention`.
Numbers that stay as they are on either side, and many queries, are left to the readable form.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int32
from torch import Tensor

from larder.core.codec import ScaleGranularity
from larder.ops.cpu.decode_attention import MAX_QUERY_ROWS, bias_array, num_threads_for, query_rows
from larder.ops.quantization import QuantizedRows


def supports(
    queries: Tensor, keys: QuantizedRows, values: QuantizedRows, num_kv_heads: int
) -> bool:
    """Whether the kernel takes this call: few query rows over codes on a CPU."""
    return (
        keys.stored.device.type == "cpu"
        and bool(keys.manner.bits and values.manner.bits)
        and queries.shape[0] // num_kv_heads * queries.shape[1] <= MAX_QUERY_ROWS
        and not (torch.is_grad_enabled() and queries.requires_grad)
    )


def quantized_attention(
    queries: Float[Tensor, "H Q D"],
    keys: QuantizedRows,
    values: QuantizedRows,
    lengths: Int32[Tensor, "G 2"],
    num_kv_heads: int,
    scaling: float,
    bias: Float[Tensor, " T"] | None = None,
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """Attend a few queries to all entries of their kv head. Safe from several threads at once."""
    from larder.ops.cpu import (
        quantized_attention_kernels as kernels,  # compiles: not before it is needed
    )

    num_heads, query_len, head_dim = queries.shape
    rows = query_rows(queries, num_kv_heads)
    owners, counts = lengths.long().unbind(1)
    order = owners.argsort(stable=True)
    starts = (counts.cumsum(0) - counts)[order]
    groups = torch.bincount(owners, minlength=num_kv_heads)
    layout = np.stack([order.numpy(), starts.numpy(), counts[order].numpy()], axis=1)
    spans = min(num_threads_for(len(keys.stored) * rows.shape[1] * head_dim), len(order))
    spans = max(spans, 1)
    bounds = np.array([len(order) * s // spans for s in range(spans + 1)], np.int64)
    attend = kernels.attend_in_parallel if spans > 1 else kernels.attend_serially
    sides = _kernel_arguments(keys), _kernel_arguments(values)
    outs, lses = attend(
        rows, *sides, bias_array(bias), layout, groups.numpy(), np.float32(scaling), bounds
    )
    out = torch.from_numpy(outs).view(num_heads, query_len, head_dim)
    return out, torch.from_numpy(lses).view(num_heads, query_len)


def _kernel_arguments(side: QuantizedRows) -> tuple[Any, ...]:
    """A side as numpy's, in the order of `coded_kernels.Side`; float16 as their bits."""
    manner = side.manner
    halves = (side.offsets, side.scales, side.factors, side.strays)
    offsets, scales, factors, strays = (half.view(torch.uint16).numpy() for half in halves)
    offsets, scales = offsets.reshape(-1), scales.reshape(-1)
    shape = (manner.bits, manner.channels, manner.group, manner.sharing is ScaleGranularity.ENTRY)
    numbers = side.stored.numpy(), offsets, scales, side.channels.numpy(), factors
    return (*shape, *numbers, side.spots.numpy(), strays)
