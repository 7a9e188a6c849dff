"""What every head rule can be asked: several query heads, one score per entry of a kv head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.observation import Calibration, Entries
from larder.core.spec import LayerSpec


class HeadRule(ABC):
    """Joins query heads. A frozen dataclass.

    Query head h belongs to kv head h // R.
    """

    # Names of the measurements that `join` looks up.
    calibrations: ClassVar[frozenset[str]] = frozenset()

    def join_stored(
        self,
        statistics: Float[Tensor, "R C"],
        entries: Entries,
        layer: LayerSpec,
        facts: Calibration,
    ) -> list[Float[Tensor, " _"]]:
        """As `join`, of statistics that lie as the storage does, a number per row of it."""
        own = [statistics[:, entries.rows(head)] for head in range(len(entries.lengths))]
        return self.join(own, entries, layer, facts)

    @abstractmethod
    def join(
        self,
        statistics: Sequence[Float[Tensor, "R _"]],
        entries: Entries,
        layer: LayerSpec,
        facts: Calibration,
    ) -> list[Float[Tensor, " _"]]:
        """One number per entry and kv head.

        Args:
            statistics: for each kv head, what its R query heads say of its S entries.
            entries: where those entries stand.
            facts: what was measured of this layer.
        """


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


def places_of(entries: Entries) -> list[Int[Tensor, " _"]]:
    """The true positions of each head's entries."""
    return list(torch.split(entries.packed_positions().long(), list(entries.lengths)))


def mean_by_position(
    voices: Sequence[tuple[Float[Tensor, " _"], Int[Tensor, " _"]]],
    places: Sequence[Int[Tensor, " _"]],
) -> Float[Tensor, " P"]:
    """The mean of several heads at each position, of those that hold it; NaN where none does.

    Args:
        voices: what each head says of its entries, and where these are; at least one.
        places: where there are entries in any head.
    """
    reach = max((int(place.max()) + 1 for place in places if len(place)), default=0)
    sums = voices[0][0].new_zeros(reach)
    holders = torch.zeros_like(sums)
    # Head by head: one call over all would add in any order on an accelerator.
    for said, place in voices:
        sums.index_add_(0, place, said)
        holders.index_add_(0, place, torch.ones_like(said))
    return sums / holders
