"""Maximum over the query heads of a kv head.

Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, and KVzip (arXiv:2505.23416).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from larder.policy.heads.base import GroupRule


@dataclass(frozen=True)
class GroupMax(GroupRule):
    """Maximum over the group."""

    def group(self, statistics: Float[Tensor, "R S"]) -> Float[Tensor, " S"]:
        return statistics.amax(0)


Part = GroupMax
