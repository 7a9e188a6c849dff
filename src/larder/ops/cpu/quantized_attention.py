"""Decode attention on a CPU over quantized entries, with fused dequantization.

Zirui Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (2024),
arXiv:2402.02750, section 3.3: dequantization is fused into the products. Where a group of entries
shares the scales and offsets of its channels,

    q . k = sum over channels of (q x scale) x code, plus q . offset

so numba's kernel folds both into the query once per group, and scales and offsets of values into
the weights of their entries; the C kernel dequantizes 16 entries at a time in a cache of the
processor, and attends to them as `larder.ops.cpu.decode_attention` does, with its parts of a head.
Unquantized keys or values, and many queries, are left to torch.
"""

from __future__ import annotations

from ctypes import byref
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from larder.core.codec import Grid, ScaleGranularity
from larder.ops.cpu.c_library import AttentionCall, CodedEntries, CodedSide, c_library
from larder.ops.cpu.decode_attention import (
    MAX_HEAD_DIM,
    MAX_QUERY_ROWS,
    SPAN_FLOATS,
    bias_array,
    num_threads_for,
    query_rows,
)
from larder.ops.quantization import QuantizedRows


def supports(
    queries: Tensor, keys: QuantizedRows, values: QuantizedRows, num_kv_heads: int
) -> bool:
    """True for few query rows over codes with even levels on a CPU, without gradient."""
    return (
        keys.stored.device.type == "cpu"
        and bool(keys.scheme.bits and values.scheme.bits)
        and keys.scheme.grid is values.scheme.grid is Grid.EVEN
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
    owners, counts = lengths.long().unbind(1)
    order = owners.argsort(stable=True)
    starts = (counts.cumsum(0) - counts)[order]
    groups = torch.bincount(owners, minlength=num_kv_heads)
    layout = torch.stack([order, starts, counts[order]], 1)
    library = c_library()
    if library is None or queries.shape[-1] > MAX_HEAD_DIM:
        return _numba_attention(queries, keys, values, layout, groups, scaling, bias)
    held = torch.zeros(num_kv_heads, dtype=torch.int64).index_add_(0, owners, counts)
    head_starts = groups.cumsum(0) - groups
    keys, values = _contiguous(keys), _contiguous(values)
    entries = CodedEntries(
        _coded_side(keys), _coded_side(values), layout.data_ptr(), head_starts.data_ptr()
    )
    num_heads, query_len, head_dim = queries.shape
    rows = num_heads // num_kv_heads * query_len
    given = queries.float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    out = given.new_empty(num_heads, query_len, head_dim)
    lse = given.new_empty(num_heads, query_len)
    call = AttentionCall(
        queries=given.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        starts=head_starts.data_ptr(),
        lengths=held.data_ptr(),
        outs=out.data_ptr(),
        lses=lse.data_ptr(),
        heads=num_kv_heads,
        num_queries=rows,
        head_dim=head_dim,
        item_bytes=given.element_size(),
        scaling=scaling,
        threads=min(torch.get_num_threads(), len(keys.stored) * rows * head_dim // SPAN_FLOATS + 1),
    )
    if library.larder_coded_attention(byref(call), byref(entries)):
        raise MemoryError("Attention over the cache could not allocate its buffers.")
    return out, lse


def _contiguous(side: QuantizedRows) -> QuantizedRows:
    """Rows, copied where a tensor is a view with gaps, which pointers would not show."""
    own = side.tensors()
    if all(tensor.is_contiguous() for tensor in own.values()):
        return side
    return QuantizedRows.adopt(side.scheme, {n: t.contiguous() for n, t in own.items()})


def _coded_side(side: QuantizedRows) -> CodedSide:
    """Pointers of keys or values, whose tensors outlive the call."""
    scheme, stored = side.scheme, side.stored
    return CodedSide(
        codes=stored.data_ptr(),
        offsets=side.offsets.data_ptr(),
        scales=side.scales.data_ptr(),
        channels=side.channels.data_ptr() if side.channels.numel() else None,
        factors=side.factors.data_ptr() if side.factors.numel() else None,
        outlier_places=side.outlier_indices.data_ptr(),
        outliers=side.outliers.data_ptr(),
        row_bytes=stored.shape[1],
        bits=scheme.bits,
        width=scheme.channels,
        group=scheme.group,
        is_by_row=scheme.sharing is ScaleGranularity.ENTRY,
        num_outliers=len(side.outliers),
    )


def _numba_attention(
    queries: Float[Tensor, "H Q D"],
    keys: QuantizedRows,
    values: QuantizedRows,
    layout: Int64[Tensor, "G 3"],
    groups: Int64[Tensor, " K"],
    scaling: float,
    bias: Float[Tensor, " T"] | None,
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """Form of numba, which compiles it at the first call."""
    from larder.ops.cpu import (
        quantized_attention_kernels as kernels,  # compiles: not before it is needed
    )

    num_heads, query_len, head_dim = queries.shape
    rows = query_rows(queries, len(groups))
    spans = min(num_threads_for(len(keys.stored) * rows.shape[1] * head_dim), len(layout))
    spans = max(spans, 1)
    bounds = np.array([len(layout) * s // spans for s in range(spans + 1)], np.int64)
    attend = kernels.attend_in_parallel if spans > 1 else kernels.attend_serially
    outs, lses = attend(
        rows,
        _kernel_arguments(keys),
        _kernel_arguments(values),
        bias_array(bias),
        layout.numpy(),
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
