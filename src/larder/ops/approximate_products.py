"""Products of queries with keys that lie channel by channel, of few channels only.

The readable form is here, the fast one, for tables in host memory, in
`larder.ops.cpu.approximate_products`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.ops.cpu import approximate_products as fast


def channel_products(
    tables: Float[Tensor, "K X C"],
    picks: Int64[Tensor, "K R N"],
    weights: Float[Tensor, "K R N"],
    length: int,
) -> Float[Tensor, "K R S"]:
    """Sums of the picked rows of each head's table, weighted; S is `length`, the first columns."""
    if fast.supports_channel_tables(tables):
        return fast.channel_products(tables, picks, weights, length)
    return reference_channel_products(tables, picks, weights, length)


def reference_channel_products(
    tables: Float[Tensor, "K X C"],
    picks: Int64[Tensor, "K R N"],
    weights: Float[Tensor, "K R N"],
    length: int,
) -> Float[Tensor, "K R S"]:
    """`channel_products` for every device and type: a matrix product per head."""
    return torch.stack(
        [
            torch.stack([w @ table[p, :length].float() for p, w in zip(ps, ws, strict=True)])
            for table, ps, ws in zip(tables, picks, weights, strict=True)
        ]
    )
