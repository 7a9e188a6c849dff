"""Exponential moving average over queries: each counts `beta` times as much as the next (A2SF).

Jo and Shin, "A2SF: Accumulative Attention Scoring with Forgetting Factor for Token Pruning in
Transformer Decoder" (2024), arXiv:2407.20485: sums over queries favor entries that have been there
for long, which forgetting evens out. Differs from the paper by dividing by the sum of the factors,
which changes no ranking and makes scores weights whatever beta is. The default is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.types import WeightChunk
from larder.policy.aggregation.base import Aggregation


@dataclass(frozen=True)
class Ema(Aggregation):
    """Exponentially weighted mean over queries.

    Args:
        beta: what a query counts beside the one after it, in [0, 1]; at 0 the last query alone
            counts, at 1 all count the same.
    """

    beta: float = 0.9

    def __post_init__(self) -> None:
        require(0 <= self.beta <= 1, "ema.beta", "a fraction in [0, 1]", self.beta)

    def fold(self, state: tuple[Tensor, ...], weights: WeightChunk, first: int, total: int) -> None:
        fresh = weights.shape[1]
        joined = torch.einsum("c,rcs->rs", self._factors(fresh, weights), weights)
        state[0].mul_(self.beta**fresh).add_(joined)

    def finish(self, state: tuple[Tensor, ...], total: int) -> Float[Tensor, "R S"]:
        return state[0] / self._factors(max(total, 1), state[0]).sum()

    def _factors(self, count: int, like: Tensor) -> Float[Tensor, " c"]:
        """Weight of each of `count` queries relative to the last of them."""
        ages = torch.arange(count - 1, -1, -1, device=like.device, dtype=like.dtype)
        return self.beta**ages


Part = Ema
