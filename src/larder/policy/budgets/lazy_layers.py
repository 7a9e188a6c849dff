"""Layer budgets of two kinds: lazy layers keep the first and latest tokens alone (SimLayerKV).

Zhang et al., "SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction" (2024),
arXiv:2410.13846: a layer is lazy where the latest queries give the first and the latest tokens more
than a threshold of their attention. It keeps these tokens, the other layers everything.

First and latest tokens are what `protect` names. The paper's threshold fixes no size; here as many
of the laziest layers are cut as the budget asks for, and the last of them keeps as many more of its
best entries as fit, every head its own, equally many. Where all layers are lazy and it still does
not fit, the laziest keep less than that. A `threshold` below 1 makes layers above it lazy in any
case, and what that saves is not spent. As in NVIDIA/kvpress, one query decides by default; the
paper's thresholds for it are .65 to .9.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from larder.core.arguments import require
from larder.core.observation import LayerScores, Observation, ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas
from larder.core.types import Packed, PackedMask
from larder.policy.aggregation.mean import Mean
from larder.policy.attention_reduction import gather_last_queries
from larder.policy.budgets._selection import top_k_even
from larder.policy.budgets.base import CrossLayerBudget


@dataclass(frozen=True)
class LazyLayers(CrossLayerBudget):
    """Full caches for some layers, protected tokens for lazy ones; waits for the last layer.

    Args:
        last: latest queries whose attention is observed, in tokens.
        threshold: share of their attention on protected tokens above which a layer is lazy
            whatever the budget, in (0, 1]; 1 for none.
    """

    last: int = 1
    threshold: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.last >= 1, "lazy_layers.last", "at least 1 token", self.last)
        require(0 < self.threshold <= 1, "lazy_layers.threshold", "in (0, 1]", self.threshold)

    def inspect(
        self, observation: Observation, scores: Packed, protected: PackedMask
    ) -> tuple[float, ...]:
        """Mean attention of the latest queries on protected tokens, over query heads."""
        heads = gather_last_queries(Mean(), observation, self.last)
        marks = torch.split(protected, list(observation.entries.lengths))
        shares = [head[:, mark].sum(1) for head, mark in zip(heads, marks, strict=True)]
        return (float(torch.cat(shares).mean()),)

    def _choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        total = sum(quotas[index] * len(scored.lengths) for index, scored in ready.items())
        held = {index: sum(scored.lengths) for index, scored in ready.items()}
        least = {index: _least(scored) for index, scored in ready.items()}
        laziness = {index: (scored.measure or (0.0,))[0] for index, scored in ready.items()}
        order = sorted(ready, key=lambda index: -laziness[index])
        is_lazy = {i: self.threshold < 1 and laziness[i] > self.threshold for i in ready}
        sizes = {i: least[i] if is_lazy[i] else held[i] for i in ready}
        for floors in (least, dict.fromkeys(ready, 0)):
            for index in order:
                excess = sum(sizes.values()) - total
                sizes[index] -= min(max(excess, 0), max(sizes[index] - floors[index], 0))
        return {index: top_k_even(scored, sizes[index]) for index, scored in ready.items()}


def _least(scored: LayerScores) -> int:
    """Entries of a layer of which every head keeps its protected ones, equally many each."""
    marks = torch.split(scored.protected, list(scored.lengths))
    most = max(int(mark.sum()) for mark in marks)
    return sum(min(most, length) for length in scored.lengths)


Part = LazyLayers
