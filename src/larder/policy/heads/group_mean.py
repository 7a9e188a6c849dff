"""The mean over the query heads of a kv head.

Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
(2023), arXiv:2306.14048, as adapted to grouped heads by most evaluations.
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
class GroupMean(HeadRule):
    """Heads of a group are averaged."""

    def join(
        self,
        statistics: Sequence[Float[Tensor, "R _"]],
        entries: Entries,
        layer: LayerSpec,
        facts: Calibration,
    ) -> list[Float[Tensor, " _"]]:
        del entries, layer, facts
        return [head.mean(0) for head in statistics]


Part = GroupMean
