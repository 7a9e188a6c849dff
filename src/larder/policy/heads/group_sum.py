"""The sum over the query heads of a kv head.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (2024),
arXiv:2404.14469, votes of grouped heads added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Entries
from larder.core.spec import LayerSpec
from larder.policy.budgets.base import Calibration
from larder.policy.heads.base import HeadRule


@dataclass(frozen=True)
class GroupSum(HeadRule):
    """Heads of a group add up."""

    def join(
        self,
        statistics: Sequence[Float[Tensor, "R _"]],
        entries: Entries,
        layer: LayerSpec,
        facts: Calibration,
    ) -> list[Float[Tensor, " _"]]:
        del entries, layer, facts
        return [head.sum(0) for head in statistics]


Part = GroupSum
