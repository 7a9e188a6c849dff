"""Layer budgets in proportion to the measured error of eviction (CompressKV).

Lin et al., "CompressKV: Semantic Retrieval Heads Know What Tokens are Not Important Before
Generation" (2025), arXiv:2508.02401, section 4.3, as in its released code: every layer keeps a
least number of entries, the rest is shared in proportion to the measured error, and no layer gets
more than a multiple of the average. Within a layer every head keeps its own best; with the head
rule `retrieval` these are the same. The errors are the measurement `eviction_error`.

The code cuts what exceeds the cap off; here it goes to the other layers, and the sum is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from larder.core.arguments import require
from larder.core.observation import Calibration, ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas
from larder.ops.apportionment import apportion
from larder.policy.budgets._selection import top_k_per_head
from larder.policy.budgets.base import Budget


@dataclass(frozen=True)
class EvictionError(Budget):
    """Layer budgets in proportion to the error that eviction makes in each.

    Args:
        least: entries that every layer has before anything is shared, or the average where that is
            less; raised to what is protected.
        most: what a layer may get, in averages.
    """

    least: int = 32
    most: float = 3.0
    calibrations = frozenset({"eviction_error"})

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.least >= 0, "eviction_error.least", "0 or more", self.least)
        require(1 <= self.most < math.inf, "eviction_error.most", "1 or more", self.most)

    def layer_tokens(
        self, tokens: int, layers: int, least: int, most: int, calibration: Calibration
    ) -> tuple[int, ...]:
        if tokens >= most:
            return (tokens,) * layers
        floor = max(least, min(self.least, tokens))
        room = min(int(self.most * tokens), most) - floor
        parts = apportion(layers * (tokens - floor), calibration["eviction_error"], 0, room)
        return tuple(floor + part for part in parts)

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        return {index: top_k_per_head(scored, quotas[index]) for index, scored in ready.items()}


Part = EvictionError
