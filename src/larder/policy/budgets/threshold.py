"""Budget by a threshold relative to the best score of a head, at most its quota.

Nguyen et al., "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs" (2024),
arXiv:2407.01082, section 3, have this rule for next tokens; here scores stand in place of
probabilities. A head that attends to few entries leaves the rest of its quota empty, so the
budget is a bound that is not always used up. Protected entries stay, and do not count as the best:
a sink would be worth more than all else together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas, Plan
from larder.ops.topk import top_mask
from larder.policy.budgets._selection import shift_non_negative
from larder.policy.budgets.base import Budget


@dataclass(frozen=True)
class Threshold(Budget):
    """Best entries of each head, down to a share of the very best.

    Args:
        tokens: entries per kv head, at most.
        share: of the best score of a head; 0 keeps all that the quota holds. Where a head has
            scores below 0, scores count from its least.
    """

    share: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.share <= 1, "threshold.share", "in [0, 1]", self.share)

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        plans: dict[int, Plan] = {}
        for index, scored in ready.items():
            heads = torch.split(scored.ranked(), list(scored.lengths))
            marks = [self._of_head(head, quotas[index]) for head in heads]
            plans[index] = Plan.from_mask(torch.cat(marks), scored.lengths)
        return plans

    def _of_head(self, ranked: Tensor, tokens: int) -> Tensor:
        worth = shift_non_negative(ranked)
        compared = worth[worth.isfinite()]
        edge = self.share * float(compared.amax()) if len(compared) else 0.0
        return top_mask(ranked, tokens) & (worth >= edge)


Part = Threshold
