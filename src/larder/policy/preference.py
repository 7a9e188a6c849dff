"""What the preference of a layer is made of: the weights that its last queries give."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.ledger import LOG_COUNT
from larder.core.observation import Observation
from larder.ops.column_statistics import ColumnReducer, reduce_columns

MIN_TAU = 0.05  # below it the power of an entropy leaves the range of a float


def gather_last_queries(
    gather: ColumnReducer, seen: Observation, window: int
) -> list[Float[Tensor, "N _"]]:
    """What `gather` makes of the weights that the last queries give, for each kv head."""
    entries = seen.entries
    return reduce_columns(
        gather,
        seen.queries[:, -window:],
        entries.keys,
        *entries.layout,
        seen.layer.scaling,
        query_positions=seen.query_positions[-window:],
        key_positions=entries.packed_positions(),
        bias=entries.columns.get(LOG_COUNT),
    )


def sum_statistics(heads: Sequence[Float[Tensor, "N _"]], count: int) -> list[float]:
    """Sums of `count` statistics over entries and heads.

    Args:
        heads: of each kv head the first statistic for all query heads, then the second, ...
    """
    sums = torch.stack([head.double().reshape(count, -1).sum(1) for head in heads]).sum(0)
    return [float(total) for total in sums]


def check_taus(name: str, *taus: float) -> None:
    """Raises: BadParameter: one of a part's `tau1`, `tau2`, ... is out of range."""
    for number, tau in enumerate(taus, start=1):
        if not MIN_TAU <= tau < math.inf:
            raise BadParameter(f"{name}.tau{number} must be at least {MIN_TAU}, got {tau}.")
