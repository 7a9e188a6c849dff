"""What every head rule can be asked: several query heads, one score per entry of a kv head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from jaxtyping import Float
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
