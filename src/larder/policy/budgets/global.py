"""All heads of all layers share one pool of entries and compete for it.

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (2025),
arXiv:2505.23416, section 3 (non-uniform head budgets). Scores of different layers must mean the
same for this to make sense: softmax weights do, cosines hardly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from larder.core.observation import Scored
from larder.core.plan import Plan
from larder.ops.topk import top_mask
from larder.policy.budgets.base import Budget, check_size, over_in_all


@dataclass(frozen=True)
class Global(Budget):
    """Joint selection over all layers and heads; waits for the last layer.

    Args:
        tokens: entries per kv head, on average over the model.
        kept: the same as a fraction of the context.
    """

    tokens: int | None = None
    kept: float | None = None

    def __post_init__(self) -> None:
        check_size("global", self.tokens, self.kept)

    def due(self, held: Mapping[int, int], allowed: Mapping[int, int]) -> bool:
        return over_in_all(held, allowed)

    def choose(self, ready: Mapping[int, Scored], quotas: Mapping[int, int]) -> dict[int, Plan]:
        if len(ready) < len(quotas):
            return {}
        layers = sorted(ready)
        ranked = [ready[index].ranked() for index in layers]
        count = sum(quotas[index] * len(ready[index].lengths) for index in layers)
        marks = torch.split(top_mask(torch.cat(ranked), count), [len(part) for part in ranked])
        pairs = zip(layers, marks, strict=True)
        return {index: Plan.from_mask(mark, ready[index].lengths) for index, mark in pairs}


Part = Global
