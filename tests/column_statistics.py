"""Column statistics as the aggregations of the policy make them, joined over query heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from larder.ops import GroupReduction, reduce_columns
from larder.policy import Aggregation, Max, Mean, Sum

STATISTICS: dict[str, Aggregation] = {"max": Max(), "sum": Sum(), "mean": Mean()}


def columns(statistic: str, *inputs: Any, group: GroupReduction, **named: Any) -> Tensor:
    """One number per packed entry."""
    heads = reduce_columns(STATISTICS[statistic], *inputs, **named)
    return torch.cat([group.join(head) for head in heads])
