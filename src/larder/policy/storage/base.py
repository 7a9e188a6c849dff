"""Base class of storages: cache form and precision of kept entries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from larder.core.codec import Codec, ResidualSpec, TransformSpec
from larder.core.observation import Entries, LayerScores, Observation, StorageStatistics
from larder.core.part import PolicyPart
from larder.core.plan import LayerPlans, Plan
from larder.core.spec import LayerPairing, LayerSpec

NO_INSPECTION = StorageStatistics()


class Storage(PolicyPart, ABC):
    """Cache form and precision of kept entries. A frozen dataclass."""

    # Whether keys are rotated to cache positions at every read.
    rerotates_keys: ClassVar[bool] = False
    # Measurements of a model that give parameters which a sentence does not name, by parameter.
    measured_parameters: ClassVar[Mapping[str, str]] = MappingProxyType({})
    # Whether layers are compared: then plans wait until all of them are scored.
    compares_layers: ClassVar[bool] = False

    @property
    def form(self) -> str:
        """Name of the cache form, a file of `larder.cache.forms`."""
        return "ragged"

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Precisions below the full one, grade 1 first; none by default."""
        return ()

    @property
    def parked(self) -> Codec | TransformSpec | None:
        """Coding of offloaded entries, where the fast tier stays exact; None if not supported."""
        return None

    @property
    def pairing(self) -> LayerPairing | None:
        """Pairing of layers that share entries; None for none."""
        return None

    @property
    def transform(self) -> TransformSpec | None:
        """Transform coding of kept entries; None for none."""
        return None

    @property
    def residual(self) -> ResidualSpec | None:
        """Coding of what predictions from the layer below leave; None for none."""
        return None

    def entries(self, tokens: int, layers: Sequence[LayerSpec], itemsize: int) -> int:
        """Number of entries that fit the bytes of `tokens` entries at full precision.

        Args:
            layers: managed layers.
            itemsize: bytes of a number at full precision.

        Raises:
            BudgetError: the bytes cannot hold what this storage needs at full precision.
        """
        return tokens

    def check(self, layers: Sequence[LayerSpec], itemsize: int) -> None:
        """Check that the storage saves bytes; passes by default.

        Raises:
            BudgetError: a stored entry would take as many bytes as an exact one.
        """
        del layers, itemsize

    def full_precision_entries(self, quota: int, layer: LayerSpec, itemsize: int) -> int:
        """Entries at full precision among the `quota` entries per kv head of a layer."""
        return quota

    def inspect(self, observation: Observation) -> StorageStatistics:
        """Statistics that `grade` needs beyond scores, measured when the layer is scored."""
        return NO_INSPECTION

    @abstractmethod
    def grade(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        """Plan with the grade of each kept entry.

        Args:
            plan: kept entries, with the merges of the compensation.
            entries: entries of the layer before the plan.
            scored: scores of the entries.
            quota: capacity of the layer, in entries per kv head.
            share: number that `compare` gave this layer.
        """

    def allocate(self, plans: Mapping[int, Plan], entries: Callable[[int], Entries]) -> LayerPlans:
        """Plans with what must be allocated over their layers together; as they are by default.

        Args:
            plans: graded plans by layer index.
            entries: callable: layer index to its entries before the plan.
        """
        return dict(plans)

    def compare(self, inspected: Sequence[StorageStatistics]) -> list[float]:
        """One number per layer from the statistics of all layers; 1 by default."""
        return [1.0] * len(inspected)
