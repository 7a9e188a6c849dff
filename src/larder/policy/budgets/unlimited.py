"""Unlimited budget: the full cache that all others are compared with; no paper."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from larder.core.observation import ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas, Plan
from larder.policy.budgets.base import WITHOUT_LIMIT, Budget


@dataclass(frozen=True)
class Unlimited(Budget):
    """Keep every entry."""

    keeps_everything: ClassVar[bool] = True

    tokens: int | None = field(default=WITHOUT_LIMIT, init=False)
    kept: float | None = field(default=None, init=False)

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        return {
            index: Plan.from_mask(torch.ones_like(scored.protected), scored.lengths)
            for index, scored in ready.items()
        }


Part = Unlimited
