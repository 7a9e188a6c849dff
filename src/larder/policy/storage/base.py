"""What every storage can be asked: in what form and at what precision entries are held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from larder.core.codec import Codec
from larder.core.observation import Entries, LayerScores, Observation, StorageStatistics
from larder.core.plan import Plan
from larder.core.spec import LayerPairing, LayerSpec

NO_INSPECTION = StorageStatistics()


class Storage(ABC):
    """Says how the entries that stay are held. A frozen dataclass."""

    form: ClassVar[str] = "ragged"  # the cache's form, by the value of `cache.sequence.Form`
    # Whether keys are turned anew for every look at them.
    turns: ClassVar[bool] = False
    # Whether layers are compared: then nothing is decided before all of them are judged.
    compares_layers: ClassVar[bool] = False

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The precisions below the full one, grade 1 first; none by default."""
        return ()

    @property
    def parked(self) -> Codec | None:
        """How it holds what is parked, where everything else stays as it is; None if it cannot."""
        return None

    @property
    def pairing(self) -> LayerPairing | None:
        """Which layers hold entries together; None where each is by itself."""
        return None

    def entries(self, tokens: int, layers: Sequence[LayerSpec], itemsize: int) -> int:
        """How many entries fit the bytes of `tokens` entries at full precision.

        Args:
            layers: those that the budget governs.
            itemsize: bytes of a number at full precision.

        Raises:
            BudgetError: the bytes cannot hold what this storage needs at full precision.
        """
        del layers, itemsize
        return tokens

    def check(self, layers: Sequence[LayerSpec], itemsize: int) -> None:
        """Raises: BudgetError: held so, an entry would take as much room as it is; never here."""
        del layers, itemsize

    def finest(self, quota: int, layer: LayerSpec, itemsize: int) -> int:
        """Of `quota` entries of a layer, how many may be held at full precision."""
        del layer, itemsize
        return quota

    def inspect(self, seen: Observation) -> StorageStatistics:
        """What `grade` must know of a layer beyond its scores; taken as the layer goes by."""
        del seen
        return NO_INSPECTION

    @abstractmethod
    def grade(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        """The plan with the grade of each entry that stays.

        Args:
            plan: what stays, its fate by the compensation included.
            entries: what the layer holds before the plan is carried out.
            scored: how its entries were judged.
            quota: entries per kv head that the layer may hold.
            share: what `compare` gave this layer.
        """

    def compare(self, inspected: Sequence[StorageStatistics]) -> list[float]:
        """One number per layer, from what was found in all of them; 1 by default."""
        return [1.0] * len(inspected)
