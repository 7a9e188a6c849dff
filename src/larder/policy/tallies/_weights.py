"""What the queries of a pass gave to each entry."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.ledger import LOG_COUNT
from larder.core.observation import Seen
from larder.ops.columns import Group
from larder.ops.rows import row_weights
from larder.policy.scorers._attention import summed_weights


def received(seen: Seen) -> Float[Tensor, " C"]:
    """Softmax weight from all queries of the pass, none of which sees its future."""
    entries = seen.entries
    if len(seen.query_positions) > 1:
        return entries.spread(
            summed_weights(seen.queries, seen.query_positions, entries, seen.layer.scaling)
        )
    layout = (torch.tensor(entries.starts), torch.tensor(entries.lengths), seen.layer.scaling)
    bias = entries.columns.get(LOG_COUNT)
    return row_weights(seen.queries, entries.keys, *layout, group=Group.SUM, bias=bias)
