"""Layer budgets that fall linearly with depth; every head keeps its own best (PyramidKV).

Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling"
(2024), arXiv:2406.02069, section 4.2: beside what all layers keep alike (in the
paper their last tokens, here what is protected) the top layer gets the average divided by beta, the
bottom layer as much more than the average as the top one gets less, the others lie between. As in
the released code a bottom layer that exceeds the context is cut to it, and the top one raised.

With `layers` it is groups of layers whose budgets fall, as in Zuo et al., "WindowKV: Task-Adaptive
Group-Wise KV Cache Window Selection for Efficient LLM Inference" (2025), arXiv:2503.17922: the last
of four groups of 8 gets 8 / 14 of the average (`beta=1.75`). A last group that is smaller gets as
much as its depth says, and all are scaled so that the sum is right.

The released code rounds the steps down, so that a few entries are lost, and takes the average for
all layers where the text is shorter than two budgets. Here the quotas sum exactly, and a text that
fits keeps the average.
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
class Pyramid(Budget):
    """Layer budgets that fall linearly with depth.

    Args:
        beta: the average over what the top layer gets, protected entries aside; 1 is uniform. The
            released code takes 20.
        layers: consecutive layers that get the same, as far as whole numbers allow.
    """

    beta: float = 20.0
    layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.beta < math.inf, "pyramid.beta", "1 or more", self.beta)
        require(self.layers >= 1, "pyramid.layers", "at least 1", self.layers)

    def layer_tokens(
        self, tokens: int, layers: int, least: int, most: int, calibration: Calibration
    ) -> tuple[int, ...]:
        if tokens >= most:
            return (tokens,) * layers
        mean, room = tokens - least, most - least
        bottom = min(2 * mean - mean / self.beta, room)
        groups = [index // self.layers for index in range(layers)]
        fall = 2 * (bottom - mean) / max(groups[-1], 1)
        weights = [max(bottom - fall * group, 0.0) for group in groups]
        weights = weights if groups[-1] else [1.0] * layers
        return tuple(least + part for part in apportion(layers * mean, weights, 0, room))

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        return {index: top_k_per_head(scored, quotas[index]) for index, scored in ready.items()}


Part = Pyramid
