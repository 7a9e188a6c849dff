"""Approximate query-key products: over a few channels, or over product-quantization codes.

The CPU kernels are in `larder.ops.cpu.approximate_products`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from larder.ops.cpu import approximate_products as fast


def channel_products(
    tables: Float[Tensor, "K X C"],
    picks: Int64[Tensor, "K R N"],
    weights: Float[Tensor, "K R N"],
    length: int,
) -> Float[Tensor, "K R S"]:
    """Weighted sums of the picked rows of each head's table over its first `length` columns (S)."""
    if fast.supports_channel_tables(tables):
        return fast.channel_products(tables, picks, weights, length)
    return torch.stack(
        [
            torch.stack([w @ table[p, :length].float() for p, w in zip(ps, ws, strict=True)])
            for table, ps, ws in zip(tables, picks, weights, strict=True)
        ]
    )


def pq_products(
    tables: Float[Tensor, "K R V N"], codes: UInt8[Tensor, "K V C"], length: int
) -> Float[Tensor, "K R S"]:
    """Sum of the table values of each entry's codes.

    Args:
        tables: value of each code (N) of each part (V) of a vector, per query head.
        codes: one per entry and part.
        length: number of entries to sum, the first ones.
    """
    if fast.supports_codes(codes):
        return fast.pq_products(tables, codes, length)
    heads, group, parts, _ = tables.shape
    indices = codes[:, None, :, :length].long().expand(heads, group, parts, length)
    return tables.gather(3, indices).sum(2)
