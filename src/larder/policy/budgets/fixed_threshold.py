"""Budget by a fixed threshold of the score, at most its pool (KVzap, Attention-Gate).

Jegou and Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning" (2026), arXiv:2601.07891,
drop what is below a threshold, and Zeng et al., "In-context KV-Cache Eviction for LLMs via
Attention-Gate" (2024), arXiv:2410.12876, what a gate is below 1/2 for. How much stays then follows
from the text. The size bounds it: where more is above the threshold, all heads of all layers
compete as under `global`; `kept=1.0` leaves the threshold alone. What is read is cut at once; what
is generated, when the size is exceeded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from larder.core.observation import ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas, Plan
from larder.ops.topk import top_mask
from larder.policy.budgets.base import CrossLayerBudget


@dataclass(frozen=True)
class FixedThreshold(CrossLayerBudget):
    """Entries whose score is at least a threshold, and protected ones; waits for the last layer.

    Args:
        tokens: entries per kv head, on average over the model, at most.
        score: the threshold.
    """

    score: float = 0.5
    cuts_within_size = True

    def _choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        ranked = [scored.ranked() for scored in ready.values()]
        packed = torch.cat(ranked)
        count = sum(quotas[index] * len(scored.lengths) for index, scored in ready.items())
        kept = top_mask(packed, count) & (packed >= self.score)
        marks = torch.split(kept, [len(part) for part in ranked])
        pairs = zip(ready.items(), marks, strict=True)
        return {index: Plan.from_mask(mark, scored.lengths) for (index, scored), mark in pairs}


Part = FixedThreshold
