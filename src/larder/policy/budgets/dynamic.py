"""Layers get entries as often as they have some among the best of the whole model.

Zhou et al., "DynamicKV: Task-Aware Adaptive KV Cache Compression for Long Context LLMs" (2024),
arXiv:2412.14838, section 4. Every layer offers its best entries, at most `most` times the average;
the best of all that is offered are counted layer by layer, and the counts, scaled to the size of
the cache, are the budgets. Within a layer every head then keeps its own best, equally many.

The paper cuts all layers so far again after every few of them; here the cut is made once, when all
layers are judged, and the whole block is held until then. Its floor is the window of last tokens;
here it is what is protected, or `least` of the average where that is more. Rounding, ties, and the
figures for `most` and `least` are ours: no released code was read. Scores of different layers must
mean the same, as for `global`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from larder.core.errors import BadParameter
from larder.core.observation import Scored
from larder.core.plan import Plan
from larder.ops.apportion import apportion
from larder.ops.topk import top_mask
from larder.policy.budgets._joint import Joint
from larder.policy.budgets._selection import evenly, needed


@dataclass(frozen=True)
class Dynamic(Joint):
    """Layer budgets by each layer's part of the best; waits for the last layer.

    Args:
        tokens: entries per kv head, on average over the model.
        kept: the same as a fraction of the context.
        most: what a layer may get, in averages. Exceeded where the others are too short.
        least: what a layer gets at least, in averages.
    """

    most: float = 10.0
    least: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.least <= 1:
            raise BadParameter(f"dynamic.least must be in [0, 1], got {self.least}.")
        if not 1 <= self.most < math.inf:
            raise BadParameter(f"dynamic.most must be 1 or more, got {self.most}.")

    def _choose(self, ready: Mapping[int, Scored], quotas: Mapping[int, int]) -> dict[int, Plan]:
        pools = [quotas[index] * len(scored.lengths) for index, scored in ready.items()]
        sizes = self._sizes(list(ready.values()), pools)
        pairs = zip(ready.items(), sizes, strict=True)
        return {index: evenly(scored, size) for (index, scored), size in pairs}

    def _sizes(self, layers: Sequence[Scored], pools: Sequence[int]) -> Sequence[int]:
        """Entries of each layer, all heads together.

        Args:
            pools: what each would have if all were treated alike.
        """
        total, held = sum(pools), [sum(layer.lengths) for layer in layers]
        if total >= sum(held):
            return held
        highs = [min(int(self.most * pool), n) for pool, n in zip(pools, held, strict=True)]
        if sum(highs) < total:
            highs = held
        lows = [
            min(max(int(self.least * pool), needed(layer)), pool, high)
            for layer, pool, high in zip(layers, pools, highs, strict=True)
        ]
        offers = [
            layer.ranked()[evenly(layer, high).kept]
            for layer, high in zip(layers, highs, strict=True)
        ]
        best = top_mask(torch.cat(offers), total)
        counts = [float(part.sum()) for part in torch.split(best, [len(o) for o in offers])]
        return apportion(total, counts, lows, highs)


Part = Dynamic
