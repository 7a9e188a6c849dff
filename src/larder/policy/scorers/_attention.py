"""How much attention cached entries get: column statistics over what a layer saw."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.observation import Entries
from larder.core.types import Packed
from larder.ops.columns import column_max, column_sum


def highest_weights(queries: Float[Tensor, "H Q D"], entries: Entries, scaling: float) -> Packed:
    """The highest softmax weight that any query of the group gives each cached entry."""
    starts, lengths = torch.tensor(entries.starts), torch.tensor(entries.lengths)
    return column_max(queries, entries.keys, starts, lengths, scaling)


def summed_weights(
    queries: Float[Tensor, "H Q D"],
    positions: Int[Tensor, " Q"],
    entries: Entries,
    scaling: float,
) -> Packed:
    """The softmax weight that all queries of the group give each entry; none sees its future."""
    starts, lengths = torch.tensor(entries.starts), torch.tensor(entries.lengths)
    return column_sum(
        queries,
        entries.keys,
        starts,
        lengths,
        scaling,
        query_positions=positions,
        key_positions=entries.packed_positions(),
    )
