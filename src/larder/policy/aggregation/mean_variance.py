"""Mean plus scaled variance over queries (CAKE).

Qin et al., "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences" (2025),
arXiv:2503.12491, its eviction indicator: mean + gamma * variance over the queries of the window. As
in the released code the variance divides by one less than the number of queries, and gamma is 200
unless given; a single query has variance 0 where the code has none. The code averages the result
over 5 neighbors, and query heads: take `snapkv(kernel=5, pool="mean")` and `group_mean`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.types import WeightChunk
from larder.policy.aggregation.base import Aggregation


@dataclass(frozen=True)
class MeanVariance(Aggregation):
    """Mean plus `gamma` times variance, over all queries; unseen entries get 0.

    Chunks of queries are joined by their means and squared deviations, so that nothing large is
    subtracted from something large.

    Args:
        gamma: weight of the variance; 0 leaves the mean.
    """

    gamma: float = 200.0

    def __post_init__(self) -> None:
        require(
            0 <= self.gamma < math.inf, "mean_variance.gamma", "a number, 0 or more", self.gamma
        )

    def start(self, like: Float[Tensor, "R S"]) -> tuple[Tensor, ...]:
        """The mean, and the sum of squared deviations from it."""
        return like.new_zeros(like.shape), like.new_zeros(like.shape)

    def fold(self, state: tuple[Tensor, ...], weights: WeightChunk, first: int, total: int) -> None:
        mean, deviations = state
        fresh = weights.shape[1]
        variance, its_mean = torch.var_mean(weights, 1, correction=0)
        apart, share = its_mean - mean, fresh / (first + fresh)
        deviations.add_(variance, alpha=fresh).add_(apart.square(), alpha=first * share)
        mean.add_(apart, alpha=share)

    def finish(self, state: tuple[Tensor, ...], total: int) -> Float[Tensor, "R S"]:
        mean, deviations = state
        return mean + self.gamma * deviations / max(total - 1, 1)


Part = MeanVariance
