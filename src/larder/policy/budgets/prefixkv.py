"""Layer budgets of equal coverage: each layer keeps the same share of its summed scores (PrefixKV).

Wang et al., "PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need
for Efficient Generation" (2024), arXiv:2412.03409, section 3. Sort the scores of a layer; a prefix
of them holds a share of their sum, its coverage. One coverage for all layers is searched at which
the shortest prefixes that reach it have the wanted size in all.

The search has an exact end: an entry is in the prefix as long as what stands before it covers less
than what is wanted, so those with the least before them stay, as many as there is room for. The
paper and its code bisect, stop within a few entries and rescale. Their sizes are found on sample
texts and reused as ratios; here they are found in each text. They average the query heads and keep
the same positions in all heads of a layer (take `layer_mean` for that); here the heads compete.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from larder.core.observation import LayerScores, ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas
from larder.policy.budgets._selection import shift_non_negative, top_k_total
from larder.policy.budgets.base import CrossLayerBudget

SAFE = -1.0  # before every coverage


@dataclass(frozen=True)
class PrefixKV(CrossLayerBudget):
    """Layer budgets of equal coverage, joint selection within a layer; waits for the last layer.

    Scores count from a layer's least where some are below 0.

    Args:
        tokens: entries per kv head, on average over the model.
    """

    def _choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        total = sum(quotas[index] * len(scored.lengths) for index, scored in ready.items())
        before = [_covered_before(scored) for scored in ready.values()]
        pairs = zip(ready.items(), _prefixes(before, total), strict=True)
        return {index: top_k_total(scored, size) for (index, scored), size in pairs}


def _covered_before(scored: LayerScores) -> Tensor:
    """Share of the layer's scores before each entry, from the best entry to the worst."""
    ranked = scored.ranked().sort(descending=True).values
    safe = ranked.isposinf()
    worth = shift_non_negative(ranked).double().masked_fill(safe, 0.0)
    covered = worth.cumsum(0)
    if not len(ranked) or float(covered[-1]) <= 0:
        return torch.where(safe, SAFE, 1.0).double()
    return torch.where(safe, SAFE, (covered - worth) / covered[-1])


def _prefixes(before: list[Tensor], total: int) -> list[int]:
    """Number of entries of each layer among the `total` with the lowest coverage before them.

    Ties go to the entries that come sooner in their layer, relative to its length.
    """
    covered = torch.cat(before)
    depths = [torch.arange(len(part)).double() / len(part) for part in before]
    sooner = torch.argsort(torch.cat(depths), stable=True).to(covered.device)
    order = sooner[torch.argsort(covered[sooner], stable=True)]
    keep = torch.zeros_like(covered, dtype=torch.bool)
    keep[order[:total]] = True
    return [int(part.sum()) for part in torch.split(keep, [len(part) for part in before])]


Part = PrefixKV
