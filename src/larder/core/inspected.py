"""What a storage looked up in a layer before it lowers the precision of its entries."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.nothing import empty_tensor
from larder.core.plan import Plan
from larder.core.types import Packed


@dataclass(frozen=True)
class StorageStatistics:
    """What a storage found out about a layer.

    Args:
        channels: the weight of each key channel; empty where nobody asked.
        weights: a number per packed entry; empty where nobody asked.
        numbers: whatever else it will need.
    """

    channels: Float[Tensor, "K D"] = field(
        default_factory=lambda: empty_tensor(torch.float32, 0, 0)
    )
    weights: Packed = field(default_factory=lambda: empty_tensor(torch.float32, 0))
    numbers: tuple[float, ...] = ()

    def after(self, plan: Plan) -> StorageStatistics:
        """The same of those entries that a plan kept."""
        return replace(self, weights=self.weights[plan.kept]) if len(self.weights) else self
