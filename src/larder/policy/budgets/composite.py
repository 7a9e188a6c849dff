"""Budget by competition of rows, one entry of each head, over all layers (KVCompose).

Akulov et al., "KVCompose: Efficient Structured KV Cache Compression with Composite Tokens" (2025),
arXiv:2509.05165, as in its code in NVIDIA's kvpress. Every head of a layer ranks its own entries;
the r-th best of all heads form a row, which is worth their mean; the best rows of the model stay.
So the heads of a layer keep equally many entries, each its own, and a cache stays rectangular.

Differences. The code gives layer 0 the highest row of any layer, rank by rank, so that none is
longer, which its storage needs and ours does not; it is not done here. Where heads are of different
lengths, a row has the heads that reach it and is worth no more than the one before; the first row
that does not fit ends the choice, so that a few entries may be left over. Scores of different
layers must mean the same, as for `global`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.observation import LayerScores, ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas
from larder.policy.budgets._selection import top_k_per_head
from larder.policy.budgets.base import CrossLayerBudget


@dataclass(frozen=True)
class Composite(CrossLayerBudget):
    """Joint selection of rows over all layers; waits for the last layer.

    Args:
        tokens: entries per kv head, on average over the model.
    """

    def _choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        total = sum(quotas[index] * len(scored.lengths) for index, scored in ready.items())
        rows = [_rows(scored) for scored in ready.values()]
        worth, sizes = (
            torch.cat([values for values, _ in rows]),
            torch.cat([size for _, size in rows]),
        )
        order = torch.argsort(worth, descending=True, stable=True)
        stays = torch.zeros_like(worth, dtype=torch.bool)
        stays[order] = sizes[order].cumsum(0) <= total
        counts = [
            int(part.sum()) for part in torch.split(stays, [len(values) for values, _ in rows])
        ]
        pairs = zip(ready.items(), counts, strict=True)
        return {index: top_k_per_head(scored, count) for (index, scored), count in pairs}


def _rows(scored: LayerScores) -> tuple[Float[Tensor, " S"], Int64[Tensor, " S"]]:
    """Worth and size of each row of a layer, both non-increasing."""
    length = max(scored.lengths, default=0)
    sums = scored.scores.new_zeros(length)
    sizes = torch.zeros(length, dtype=torch.int64, device=sums.device)
    for head in torch.split(scored.ranked(), list(scored.lengths)):
        sums[: len(head)] += head.sort(descending=True).values
        sizes[: len(head)] += 1
    means = (sums / sizes).nan_to_num(torch.inf, torch.inf, -torch.inf)  # what is protected stays
    return means.cummin(0).values if length else means, sizes


Part = Composite
