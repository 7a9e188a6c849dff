"""Maximum over queries, with the mean of that as a floor (DefensiveKV).

Feng et al., "Taming the Fragility of KV Cache Eviction in LLM Inference" (2025), arXiv:2510.13334,
DefensiveKV: the risk of losing an entry is its highest weight over the window and over the query
heads of its group (take `group_max`), and where the window happened not to look, the mean risk of
the judged entries stands in. Entries below that floor are equal to each other; the paper tells them
apart by their values, so take `criticality` with it. As in the released code each query's weights
are first smoothed by the mean over `kernel` neighbors and brought back to their sum, and the
window's own entries take no part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.types import WeightChunk
from larder.ops.pooling import running_mean
from larder.policy.aggregation.max import Max


@dataclass(frozen=True)
class Defensive(Max):
    """Maximum over smoothed queries, at least the mean over entries.

    Args:
        kernel: neighbors over which each query's weights are smoothed, in entries. Odd; 1 smooths
            nothing.
    """

    kernel: int = 5
    depends_on_other_entries = True

    def __post_init__(self) -> None:
        require(self.kernel >= 1 and self.kernel % 2 == 1, "defensive.kernel", "odd", self.kernel)

    def fold(self, state: tuple[Tensor, ...], weights: WeightChunk, first: int, total: int) -> None:
        smooth = running_mean(weights, self.kernel)
        sums = smooth.sum(-1, keepdim=True).clamp(min=torch.finfo(smooth.dtype).tiny)
        super().fold(state, smooth * (weights.sum(-1, keepdim=True) / sums), first, total)

    def complete(self, scores: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
        return torch.maximum(scores, scores.mean()) if len(scores) else scores


Part = Defensive
