"""Sum over the query heads of a kv head.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (2024),
arXiv:2404.14469, votes of grouped heads added up.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from larder.policy.heads.base import GroupRule


@dataclass(frozen=True)
class GroupSum(GroupRule):
    """Sum over the group."""

    def group(self, statistics: Float[Tensor, "R S"]) -> Float[Tensor, " S"]:
        return statistics.sum(0)


Part = GroupSum
