"""Mean over the query heads of a kv head.

Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
(2023), arXiv:2306.14048, as adapted to grouped heads by most evaluations.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from larder.policy.heads.base import GroupRule


@dataclass(frozen=True)
class GroupMean(GroupRule):
    """Mean over the group."""

    def group(self, statistics: Float[Tensor, "R S"]) -> Float[Tensor, " S"]:
        return statistics.mean(0)


Part = GroupMean
