"""Head budgets by retrieval or reasoning score over a common base (HeadKV).

Fu et al., "Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval
and Reasoning" (2024), arXiv:2410.19258 (HeadKV), section 3.2: of the b entries that every head has
on average beside what is protected, b // beta go into a pool for the whole model, which is shared
by scores, and the rest is every head's own. Whole numbers are rounded down, as in the released
code. What is protected comes first, as the last 32 tokens do there.

Scores are the measurement `reasoning` (HeadKV-R2) or `retrieval` (HeadKV-R; by weights on what is
looked up, where the paper counts copies), averaged over the query heads of a kv head (inferred);
the paper and its code keep a cache for every query head. The code rounds every head's budget, so
that the total is met only nearly, and tempers scores by a power that it sets to 1. Here layers sum
exactly, a head that cannot fill its part leaves it to the others of its layer, and a layer to the
other layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from larder.core.arguments import require
from larder.core.observation import Calibration, ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas, Plan
from larder.ops.apportionment import apportion
from larder.policy.budgets._selection import top_k_by_head_weight
from larder.policy.budgets.base import Budget
from larder.policy.layer_calibration import split_evenly


class HeadTrial(Enum):
    """Measurement that scores heads: reasoning answers, or retrieval only."""

    REASONING = "reasoning"
    RETRIEVAL = "retrieval"


@dataclass(frozen=True)
class HeadKV(Budget):
    """Head budgets by score over a common base.

    Args:
        beta: one over the part of the budget that is shared by scores; 1 shares all of it. The
            paper tries 1.005 to 10.
        trial: `reasoning` or `retrieval`.
    """

    beta: float = 1.2
    trial: HeadTrial = HeadTrial.REASONING
    calibrations = frozenset({"reasoning", "retrieval"})

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.beta < math.inf, "headkv.beta", "1 or more", self.beta)

    def required_calibrations(self) -> frozenset[str]:
        return frozenset({self.trial.value})

    def head_weights(self, calibration: Calibration) -> tuple[float, ...]:
        return calibration[self.trial.value]

    def layer_tokens(
        self, tokens: int, layers: int, least: int, most: int, calibration: Calibration
    ) -> tuple[int, ...]:
        if tokens >= most:
            return (tokens,) * layers
        name = self.trial.value
        sums = [sum(numbers) for numbers in split_evenly(name, calibration[name], layers)]
        mean, total = tokens - least, sum(sums)
        base = self._base(mean)
        shares = [each / total if total > 0 else 1 / layers for each in sums]
        deserved = [base + layers * share * (mean - base) for share in shares]
        return tuple(least + part for part in apportion(layers * mean, deserved, 0, most - least))

    def _base(self, mean: int) -> int:
        """Base of every head, of `mean` entries beside the protected ones."""
        return mean - int(mean // self.beta)

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        average = sum(quotas.values()) / len(quotas)
        plans: dict[int, Plan] = {}
        for index, scored in ready.items():
            shielded = int(scored.protected.sum()) / len(scored.lengths)
            base = self._base(max(int(average - shielded), 0))
            plans[index] = top_k_by_head_weight(scored, quotas[index] * len(scored.lengths), base)
        return plans


Part = HeadKV
