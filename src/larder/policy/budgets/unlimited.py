"""Unlimited budget: the full cache that all others are compared with; no paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from larder.core.observation import LayerScores
from larder.core.plan import Plan
from larder.policy.budgets.base import Budget

WITHOUT_LIMIT = 1 << 62  # entries per head, above any real cache


@dataclass(frozen=True)
class Unlimited(Budget):
    """Keep every entry."""

    tokens: int | None = field(default=WITHOUT_LIMIT, init=False)
    kept: float | None = field(default=None, init=False)

    def choose(
        self, ready: Mapping[int, LayerScores], quotas: Mapping[int, int]
    ) -> dict[int, Plan]:
        return {
            index: Plan.from_mask(torch.ones_like(scored.protected), scored.lengths)
            for index, scored in ready.items()
        }


Part = Unlimited
