"""Decode attention on a CPU over quantized entries, with fused dequantization.

Zirui Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (2024),
arXiv:2402.02750, section 3.3: dequantization is fused into the products. Where a group of entries
shares the scales and offsets of its channels,

    q . k = sum over channels of (q x scale) x code, plus q . offset

so both are folded into the query once per group; scales and offsets of values go into the weights
of their entries. Only keys with scales per entry are dequantized, block by block. Spans cover
groups instead of entries, otherwise as in `larder.ops.cpu.decode_attention`. Unquantized keys or
values, and many queries, are left to torch.
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
    """True for few query rows over codes on a CPU, without gradient."""
    return (
        keys.stored.device.type == "cpu"
        and bool(keys.scheme.bits and values.scheme.bits)
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
    """Kernel of `quantized_attention` for a few queries; thread-safe."""
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
    outs, lses = attend(
        rows,
        _kernel_arguments(keys),
        _kernel_arguments(values),
        bias_array(bias),
        layout,
        groups.numpy(),
        np.float32(scaling),
        bounds,
    )
    out = torch.from_numpy(outs).view(num_heads, query_len, head_dim)
    return out, torch.from_numpy(lses).view(num_heads, query_len)


def _kernel_arguments(side: QuantizedRows) -> tuple[Any, ...]:
    """Keys or values as the tuple that the kernels document; float16 as its bits."""
    scheme = side.scheme
    return (
        scheme.bits,
        scheme.channels,
        scheme.group,
        scheme.sharing is ScaleGranularity.ENTRY,
        side.stored.numpy(),
        side.offsets.view(torch.uint16).numpy().reshape(-1),
        side.scales.view(torch.uint16).numpy().reshape(-1),
        side.channels.numpy(),
        side.factors.view(torch.uint16).numpy(),
        side.outlier_indices.numpy(),
        side.outliers.view(torch.uint16).numpy(),
    )
