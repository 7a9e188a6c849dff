"""Rows of a flat storage, copied into a fresh one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def relocate_rows(
    stored: Sequence[Tensor],
    columns: Float[Tensor, "n C"],
    rows: Sequence[Int64[Tensor, " _"]],
    starts: Int64[Tensor, " K"],
    size: int,
) -> list[Tensor]:
    """The given rows of each head in storage of `size` rows, columns last.

    Args:
        stored: keys, values and positions, one row per row of the storage.
        starts: where each head begins in the new one. What lies between holds anything.
    """
    keys, values, positions = stored
    fresh = [keys.new_empty(size, keys.shape[1]), values.new_empty(size, values.shape[1])]
    fresh.append(torch.zeros(size, dtype=torch.int32, device=keys.device))
    numbers = columns.new_zeros(len(columns), size)
    for part, start in zip(rows, starts.tolist(), strict=True):
        part, there = part.to(keys.device), slice(start, start + len(part))
        for old, new in zip(stored, fresh, strict=True):
            torch.index_select(old, 0, part, out=new[there])
        numbers[:, there] = columns[:, part]
    return [*fresh, numbers]
