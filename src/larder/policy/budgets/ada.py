"""Head budgets by competition within a layer, with a floor per head (Ada-KV).

Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference" (2024), arXiv:2407.11550, algorithm 1, with a safeguard of 0.2 unless given. The released
code mixes: what a head wins counts 0.8 and the average 0.2, each head's sum rounded, so that the
total is met only nearly. Here the best of each head up to the floor are safe, then all heads
compete for what is left, and the sum is exact. `pooled` is the same without a floor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from larder.core.arguments import require
from larder.core.observation import LayerScores, ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas, Plan
from larder.policy.budgets._selection import top_k_per_head, top_k_per_layer
from larder.policy.budgets.base import Budget


@dataclass(frozen=True)
class Ada(Budget):
    """Joint selection over the heads of a layer, with a floor for each.

    Args:
        tokens: entries per kv head, on average over the layer.
        safeguard: the floor, as a share of the average; 0 is `pooled`, 1 is `uniform`.
    """

    safeguard: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.safeguard <= 1, "ada.safeguard", "in [0, 1]", self.safeguard)

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        return {index: self._of_layer(scored, quotas[index]) for index, scored in ready.items()}

    def _of_layer(self, scored: LayerScores, tokens: int) -> Plan:
        safe = torch.zeros_like(scored.protected)
        safe[top_k_per_head(scored, int(self.safeguard * tokens)).kept] = True
        return top_k_per_layer(replace(scored, protected=scored.protected | safe), tokens)


Part = Ada
