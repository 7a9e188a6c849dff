"""Products of queries with keys of which only codes are held: sums of numbers looked up.

The readable form is here, the fast one, for codes in host memory, in `larder.ops.cpu.codes`.
"""

from __future__ import annotations

from jaxtyping import Float, UInt8
from torch import Tensor

from larder.ops.cpu import codes as fast


def pq_products(
    tables: Float[Tensor, "K R V N"], codes: UInt8[Tensor, "K V C"], length: int
) -> Float[Tensor, "K R S"]:
    """For each entry the sum of what its codes stand for.

    Args:
        tables: for every part of a vector, what each code of it counts for a query head.
        codes: of every entry, one per part.
        length: how many entries are asked for, the first ones.
    """
    if fast.supports_codes(codes):
        return fast.pq_products(tables, codes, length)
    return reference_pq_products(tables, codes, length)


def reference_pq_products(
    tables: Float[Tensor, "K R V N"], codes: UInt8[Tensor, "K V C"], length: int
) -> Float[Tensor, "K R S"]:
    """`pq_products` for every device: one gathering per head."""
    heads, group, parts, _ = tables.shape
    places = codes[:, None, :, :length].long().expand(heads, group, parts, length)
    return tables.gather(3, places).sum(2)
