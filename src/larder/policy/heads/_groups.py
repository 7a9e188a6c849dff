"""Head rules that look at one group of query heads at a time, and at nothing else."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Calibration, Entries
from larder.core.spec import LayerSpec
from larder.policy.heads.base import HeadRule


class GroupRule(HeadRule):
    """Joins the R query heads of each kv head by the same rule. A frozen dataclass."""

    @abstractmethod
    def group(self, statistics: Float[Tensor, "R S"]) -> Float[Tensor, " S"]:
        """One number per entry of a kv head."""

    def join(
        self,
        statistics: Sequence[Float[Tensor, "R _"]],
        entries: Entries,
        layer: LayerSpec,
        facts: Calibration,
    ) -> list[Float[Tensor, " _"]]:
        del entries, layer, facts
        return [self.group(head) for head in statistics]

    def join_stored(
        self,
        statistics: Float[Tensor, "R C"],
        entries: Entries,
        layer: LayerSpec,
        facts: Calibration,
    ) -> list[Float[Tensor, " _"]]:
        del layer, facts
        joined = self.group(statistics)
        return [joined[entries.rows(head)] for head in range(len(entries.lengths))]
