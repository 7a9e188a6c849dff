"""Tables that grow with what an index knows, a row of numbers per kv head."""

from __future__ import annotations

from torch import Tensor

MIN_COLUMNS = 64  # columns of the smallest table
GROWTH_SHARE = 4  # a table grows by at least 1 / MARGIN, so that growing costs little per entry


def grow_table(table: Tensor, needed: int, dim: int = 1) -> Tensor:
    """The table with room for `needed` along a dimension: itself, or a larger copy.

    What lies behind the old end is zero.
    """
    room = table.shape[dim]
    if needed <= room:
        return table
    shape = list(table.shape)
    shape[dim] = max(needed, room + room // GROWTH_SHARE, MIN_COLUMNS)
    larger = table.new_zeros(shape)
    larger.narrow(dim, 0, room).copy_(table)
    return larger


def trim_table(table: Tensor, needed: int, dim: int = 1) -> Tensor:
    """The table without its slack."""
    return table.narrow(dim, 0, needed).contiguous()
