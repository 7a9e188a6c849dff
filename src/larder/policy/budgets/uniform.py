"""Uniform budget: every head of every layer keeps the same number of entries.

The common default, no paper of its own; EpiCache's released code calls it `pair-uniform`
(arXiv:2509.17396).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from larder.core.observation import ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas, StepQuota
from larder.policy.budgets._selection import top_k_per_head
from larder.policy.budgets.base import Budget


@dataclass(frozen=True)
class Uniform(Budget):
    """Same number of entries for all heads.

    Args:
        tokens: entries per kv head.
    """

    def step_quota(
        self, scalars: Mapping[str, Float[Tensor, " K"]], quota: int, tokens: int
    ) -> StepQuota:
        return StepQuota(max(quota, 0), tokens)

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        return {index: top_k_per_head(scored, quotas[index]) for index, scored in ready.items()}


Part = Uniform
