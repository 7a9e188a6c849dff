"""Attention over pages on a CPU, by the kernels of ragged storage.

Pages that lie one behind the other are ragged storage, and are read in place; others are gathered.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from torch import Tensor

from larder.ops.attention import ragged_attention
from larder.ops.pages import SegmentTables, gather_pages


def paged_attention(
    queries: Float[Tensor, "S R Q D"],
    keys: Float[Tensor, "N P D"],
    values: Float[Tensor, "N P D"],
    tables: SegmentTables,
    scaling: float,
    bias: Float[Tensor, "N P"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "S R Q D"], Float[Tensor, "S R Q"]]:
    """Attention of every query over all entries of its segment; see `ops.paged_attention`."""
    lengths = tables.lengths.long()
    if _are_runs(tables, keys.shape[1]):
        starts = tables.table[:, 0].long() * keys.shape[1]
        sides = keys.flatten(0, 1), values.flatten(0, 1)
        added = None if bias is None else bias.flatten()
    else:
        starts, total = lengths.cumsum(0) - lengths, int(lengths.sum())
        layout = tables.table, tables.lengths, starts, total
        sides = gather_pages(keys, *layout), gather_pages(values, *layout)
        added = None if bias is None else gather_pages(bias.unsqueeze(2), *layout).squeeze(1)
    out, lse = ragged_attention(
        queries.flatten(0, 1), *sides, starts, lengths, scaling, added, softcap=softcap
    )
    return out.unflatten(0, queries.shape[:2]), lse.unflatten(0, queries.shape[:2])


def _are_runs(tables: SegmentTables, page_tokens: int) -> bool:
    """True if the pages of each segment follow each other in the pool."""
    table, lengths = tables.table.numpy(), tables.lengths.numpy()
    last = np.maximum(lengths - 1, 0) // page_tokens
    ahead = np.arange(table.shape[1])
    steps = table - table[:, :1] == ahead
    return bool((steps | (ahead > last[:, None])).all())
