"""Budget by competition of all heads of all layers for one pool (KVzip).

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (2025),
arXiv:2505.23416, section 3 (non-uniform head budgets). Scores of different layers must mean the
same for this to make sense: softmax weights do, cosines hardly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from larder.core.observation import ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas, Plan
from larder.ops.topk import top_mask
from larder.policy.budgets.base import CrossLayerBudget


@dataclass(frozen=True)
class Global(CrossLayerBudget):
    """Joint selection over all layers and heads; waits for the last layer.

    Args:
        tokens: entries per kv head, on average over the model.
    """

    def _choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        ranked = [scored.ranked() for scored in ready.values()]
        count = sum(quotas[index] * len(scored.lengths) for index, scored in ready.items())
        marks = torch.split(top_mask(torch.cat(ranked), count), [len(part) for part in ranked])
        pairs = zip(ready.items(), marks, strict=True)
        return {index: Plan.from_mask(mark, scored.lengths) for (index, scored), mark in pairs}


Part = Global
