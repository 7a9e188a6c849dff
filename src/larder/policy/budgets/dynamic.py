"""Layer budgets by the number of entries among the best of the whole model (DynamicKV).

Zhou et al., "DynamicKV: Task-Aware Adaptive KV Cache Compression for Long Context LLMs" (2024),
arXiv:2412.14838, section 4. A layer first keeps its best entries, at most `most` times the average.
After every `every` layers the best scores of all layers so far are counted, as many as these layers
have to themselves on average; the room of the whole model is shared by the counts, and every layer
so far is cut to its share. The room of each shrinks as more layers join, and what was cut does not
come back. Within a layer every head keeps its own best, equally many.

Checked against the released code: `most` 10, `every` 4, window 8, and 7 neighbors of which the
highest counts. It rounds shares down and gives the last layer what is left over, and bounds them
from below nowhere (a floor of 0.1 is warned of); here they are rounded to the largest remainders,
and `least` is a floor. Scores of different layers must mean the same, as for `global`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from larder.core.arguments import require
from larder.core.observation import LayerScores, ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas
from larder.ops.apportionment import apportion
from larder.ops.topk import top_mask
from larder.policy.budgets._selection import min_entries, top_k_even
from larder.policy.budgets.base import Budget


@dataclass(frozen=True)
class Dynamic(Budget):
    """Layer budgets by each layer's part of the best, cut again while the layers go by.

    Args:
        tokens: entries per kv head, on average over the model.
        most: what a layer may get, in averages. Exceeded where the others are too short.
        least: what a layer gets at least, in averages.
        every: layers between two cuts.
    """

    most: float = 10.0
    least: float = 0.1
    every: int = 4
    replans = True
    has_shared_pool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.least <= 1, "dynamic.least", "in [0, 1]", self.least)
        require(1 <= self.most < math.inf, "dynamic.most", "1 or more", self.most)
        require(self.every >= 1, "dynamic.every", "at least 1 layer", self.every)

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        """Plans for all layers so far where these are cut, else for the newest."""
        layers = sorted(ready)
        if len(ready) % self.every and len(ready) < len(quotas):
            newest = layers[-1]
            pool = quotas[newest] * len(ready[newest].lengths)
            return {newest: top_k_even(ready[newest], int(self.most * pool))}
        sizes = self._sizes([ready[index] for index in layers], layers, quotas)
        return {i: top_k_even(ready[i], size) for i, size in zip(layers, sizes, strict=True)}

    def _sizes(
        self, judged: Sequence[LayerScores], layers: Sequence[int], quotas: LayerQuotas
    ) -> Sequence[int]:
        """Entries of each layer so far, all heads together; they share the room of all layers."""
        heads = {i: len(scored.lengths) for i, scored in zip(layers, judged, strict=True)}
        narrowest = min(heads.values())
        pools = {i: quota * heads.get(i, narrowest) for i, quota in quotas.items()}
        total, own = sum(pools.values()), [pools[i] for i in layers]
        held = [sum(scored.lengths) for scored in judged]
        if total >= sum(held):
            return held
        highs = [min(int(self.most * pool), n) for pool, n in zip(own, held, strict=True)]
        if sum(highs) < total:
            highs = held
        lows = [
            min(max(int(self.least * pool), min_entries(scored)), pool, high)
            for scored, pool, high in zip(judged, own, highs, strict=True)
        ]
        offers = [
            scored.ranked()[top_k_even(scored, high).kept]
            for scored, high in zip(judged, highs, strict=True)
        ]
        best = top_mask(torch.cat(offers), min(sum(own), sum(map(len, offers))))
        counts = [float(part.sum()) for part in torch.split(best, [len(o) for o in offers])]
        return apportion(total, counts, lows, highs)


Part = Dynamic
