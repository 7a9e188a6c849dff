"""Sum over queries.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (2024),
arXiv:2404.14469, section 4, and most methods after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from larder.core.types import WeightChunk
from larder.policy.aggregation.base import Aggregation


@dataclass(frozen=True)
class Sum(Aggregation):
    """Sum over queries."""

    def fold(self, state: tuple[Tensor, ...], weights: WeightChunk, first: int, total: int) -> None:
        state[0].add_(weights[:, 0] if weights.shape[1] == 1 else weights.sum(1))

    def single_query(self, weights: Float[Tensor, "R S"]) -> Float[Tensor, "R S"]:
        return weights


Part = Sum
