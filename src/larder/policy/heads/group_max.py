"""The highest of the query heads of a kv head.

Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, and KVzip (arXiv:2505.23416).
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
class GroupMax(HeadRule):
    """The most interested head counts."""

    def join(
        self,
        statistics: Sequence[Float[Tensor, "R _"]],
        entries: Entries,
        layer: LayerSpec,
        facts: Calibration,
    ) -> list[Float[Tensor, " _"]]:
        del entries, layer, facts
        return [head.amax(0) for head in statistics]


Part = GroupMax
