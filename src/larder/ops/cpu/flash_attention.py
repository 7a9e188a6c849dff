"""Attention of many queries on a CPU, by torch's flash kernel with its log-sum-exp.

Behavior of `_scaled_dot_product_flash_attention_for_cpu` in torch 2.13: it accepts grouped heads
(query head h reads kv head h // R); is_causal aligns the first query with the first key, so it is
used for equal lengths only; masks have the queries' dtype or float32, and may be one row for all
queries; a fully masked row gives output 0 but log-sum-exp 0, which is corrected here; an empty key
tensor ends the process with a division by zero, so none is passed. In bfloat16 its outputs are
rounded to bfloat16; they are returned as float32 like all others.
"""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OPERATOR = "aten::_scaled_dot_product_flash_attention_for_cpu"


def supports(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """True if torch's kernel exists and supports these tensors."""
    return (
        queries.device.type == keys.device.type == "cpu"
        and queries.dtype == keys.dtype == values.dtype
        and keys.dtype in DTYPES
        and _has_operator()
    )


@cache
def _has_operator() -> bool:
    """True if torch has the operator, which is not part of its public interface."""
    return bool(torch._C._jit_get_schemas_for_operator(OPERATOR))


def ragged(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "C D"],
    values: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    scaling: float,
    bias: Float[Tensor, " C"] | None = None,
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """Kernel of `ragged_attention`; a group of R heads becomes R x Q query rows of one head."""
    num_kv_heads = lengths.shape[0]
    out = queries.new_zeros(queries.shape, dtype=torch.float32)
    lse = queries.new_full(queries.shape[:2], -torch.inf, dtype=torch.float32)
    rows = queries.reshape(num_kv_heads, 1, -1, queries.shape[-1])  # [K, 1, R * Q, D]
    outs, lses = out.view(rows.shape), lse.view(rows.shape[:-1])
    for h, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if length > 0 and rows.shape[2] > 0:
            own = slice(start, start + length)
            added = {} if bias is None else {"attn_mask": _bias_mask(bias[own], queries.dtype)}
            outs[h], lses[h] = _flash_attention(
                rows[h], keys[None, own], values[None, own], scaling, **added
            )
    return out, lse


def causal(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "K Q D"],
    values: Float[Tensor, "K Q D"],
    scaling: float,
    sections: tuple[int, ...],
    window: int | None,
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """Kernel of `causal_attention`; sections of equal length become one batch."""
    if window is None and len(sections) > 1 and len(set(sections)) == 1 and sections[0] > 0:
        return _causal_batch(queries, keys, values, scaling, len(sections))
    if len(sections) == 1 and sections[0] > 0:
        return _causal_section(queries, keys, values, scaling, window)
    out = queries.new_zeros(queries.shape, dtype=torch.float32)
    lse = queries.new_full(queries.shape[:2], -torch.inf, dtype=torch.float32)
    start = 0
    for length in filter(None, sections):
        own = slice(start, start + length)
        section = queries[:, own], keys[:, own], values[:, own]
        out[:, own], lse[:, own] = _causal_section(*section, scaling, window)
        start += length
    return out, lse


def _causal_section(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None
) -> tuple[Tensor, Tensor]:
    if window is not None and window < queries.shape[1]:
        return _sliding_window(queries, keys, values, scaling, window)
    return _flash_attention(queries, keys, values, scaling, is_causal=True)


def masked(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "K S D"],
    values: Float[Tensor, "K S D"],
    scaling: float,
    mask: Bool[Tensor, "Q S"],
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """Attention under one mask for all heads; needs at least one key."""
    hidden = torch.zeros_like(mask, dtype=queries.dtype).masked_fill(~mask, -torch.inf)
    out, lse = _flash_attention(queries, keys, values, scaling, attn_mask=hidden)
    blind = ~mask.any(-1)
    return out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -torch.inf)


def _causal_batch(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, count: int
) -> tuple[Tensor, Tensor]:
    cut = [t.unflatten(1, (count, -1)).transpose(0, 1) for t in (queries, keys, values)]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *cut, is_causal=True, scale=scaling
    )  # [sections, H, Q', D], [sections, H, Q']
    return out.transpose(0, 1).flatten(1, 2).float(), lse.transpose(0, 1).flatten(1, 2)


def _sliding_window(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int
) -> tuple[Tensor, Tensor]:
    """Causal window in chunks of queries, each with the keys that its queries can see."""
    chunk = max(window, 64)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for start in range(0, queries.shape[1], chunk):
        stop = min(start + chunk, queries.shape[1])
        first = max(start - window + 1, 0)
        back = torch.arange(start, stop).unsqueeze(-1) - torch.arange(first, stop)
        seen = slice(first, stop)
        mask = (back >= 0) & (back < window)
        out, lse = masked(queries[:, start:stop], keys[:, seen], values[:, seen], scaling, mask)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def _bias_mask(bias: Float[Tensor, " S"], dtype: torch.dtype) -> Float[Tensor, "1 S"]:
    """Bias as a mask of one row; not in half precision, where ln(1000) would be off by 1 in 60."""
    return bias.to(torch.promote_types(dtype, torch.float32)).unsqueeze(0)


def _flash_attention(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, **options: object
) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries[None], keys[None], values[None], scale=scaling, **options
    )
    return out[0].float(), lse[0].float()
