"""What every budget can be asked: how many entries per layer, and which of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from larder.core.errors import BadParameter
from larder.core.ledger import Ledger
from larder.core.observation import Calibration, LayerScores, Need, Observation
from larder.core.plan import Plan
from larder.core.spelling import name_of
from larder.core.types import Packed


class Budget(ABC):
    """Splits a number of entries over layers and heads.

    A budget is a frozen dataclass with the fields `tokens` (entries per kv head, averaged over
    layers) and `kept` (a fraction of the context); at most one is given, none leaves it open.
    """

    tokens: int | None
    kept: float | None

    # Names of the measurements that `layer_tokens` and `head_weights` look up.
    calibrations: ClassVar[frozenset[str]] = frozenset()
    # Names of the tallies whose columns `measure` reads.
    tallies: ClassVar[frozenset[str]] = frozenset()
    ledger: ClassVar[Ledger] = Ledger()  # what it has the cache remember
    # Whether a protected share is one of each layer's own entries, not of the average.
    protects_own_share: ClassVar[bool] = False
    # Whether `choose` is asked again about layers that have been cut, as more layers go by.
    replans: ClassVar[bool] = False

    def needs(self) -> frozenset[Need]:
        """What `measure` has to see beside queries, keys and entries; nothing by default."""
        return frozenset()

    def measure(self, seen: Observation, scores: Packed) -> tuple[float, ...]:
        """What `choose` must know of a layer beyond its scores; taken as the layer goes by."""
        del seen, scores
        return ()

    def layer_tokens(
        self, tokens: int, layers: int, least: int, most: int, facts: Calibration
    ) -> tuple[int, ...]:
        """Entries per kv head for each managed layer; they sum to `layers * tokens`.

        Args:
            tokens: the average.
            layers: managed layers.
            least: entries that each layer needs for what is protected.
            most: entries that a layer can fill, the length of the context.
            facts: measurements named in `calibrations`.
        """
        del least, most, facts
        return (tokens,) * layers

    def measured(self) -> frozenset[str]:
        """Names of the measurements that this budget, with these parameters, will look up."""
        return self.calibrations

    def head_weights(self, facts: Calibration) -> tuple[float, ...]:
        """How much each head counts, layer by layer, as `Scored.weights` is to have it.

        One number per kv head, or one per query head, whose groups are then averaged. None by
        default: no heads are told apart.

        Args:
            facts: measurements named in `calibrations`.
        """
        del facts
        return ()

    def is_plan_due(self, held: Mapping[int, int], allowed: Mapping[int, int]) -> bool:
        """Whether a plan is due while generating.

        Args:
            held: entries of each managed layer, all heads together, by layer index.
            allowed: entries that it may hold before one is due.
        """
        return any(held[layer] > most for layer, most in allowed.items())

    @abstractmethod
    def choose(
        self, ready: Mapping[int, LayerScores], quotas: Mapping[int, int]
    ) -> dict[int, Plan]:
        """Plans for those of the judged layers that can be decided now.

        Args:
            ready: judged layers that have no plan yet, by layer index; with `recuts`, those cut
                earlier too, as they are now.
            quotas: entries per kv head of every managed layer, by layer index.
        """


def exceeds_total(held: Mapping[int, int], allowed: Mapping[int, int]) -> bool:
    """Whether all layers together hold more than they may: for layers that share one pool."""
    return sum(held[layer] for layer in allowed) > sum(allowed.values())


def check_size(name: str, tokens: int | None, kept: float | None) -> None:
    """Raises: BadParameter: both sizes given, or one out of range."""
    if tokens is not None and kept is not None:
        raise BadParameter(
            f"{name} was given tokens={tokens} and kept={kept}: give one of the two."
        )
    if tokens is not None and tokens < 1:
        raise BadParameter(f"{name}.tokens must be at least 1, got {tokens}.")
    if kept is not None and not 0 < kept <= 1:
        raise BadParameter(f"{name}.kept must be a fraction in (0, 1], got {kept}.")


@dataclass(frozen=True)
class CrossLayerBudget(Budget):
    """Layers share one pool of entries and wait for the last of them."""

    tokens: int | None = None
    kept: float | None = None

    def __post_init__(self) -> None:
        check_size(name_of(type(self)), self.tokens, self.kept)

    def is_plan_due(self, held: Mapping[int, int], allowed: Mapping[int, int]) -> bool:
        return exceeds_total(held, allowed)

    def choose(
        self, ready: Mapping[int, LayerScores], quotas: Mapping[int, int]
    ) -> dict[int, Plan]:
        return {} if len(ready) < len(quotas) else self._choose(dict(sorted(ready.items())), quotas)

    @abstractmethod
    def _choose(
        self, ready: Mapping[int, LayerScores], quotas: Mapping[int, int]
    ) -> dict[int, Plan]:
        """Plans for all layers, which come in order of their indices."""
