"""Head budgets by competition of the heads of a layer for one pool.

Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference" (2024), arXiv:2407.11550, algorithm 1; here without its floor per head, as EpiCache runs
it for all methods (arXiv:2509.17396; `pair` in its released code). Protect sinks or recent tokens
if no head may run empty.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas
from larder.policy.budgets._selection import top_k_per_layer
from larder.policy.budgets.base import Budget


@dataclass(frozen=True)
class Pooled(Budget):
    """Joint selection over the heads of a layer.

    Args:
        tokens: entries per kv head, on average over the layer.
    """

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        return {index: top_k_per_layer(scored, quotas[index]) for index, scored in ready.items()}


Part = Pooled
