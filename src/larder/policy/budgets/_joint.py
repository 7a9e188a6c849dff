"""Budgets that choose once, when all layers are judged."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from larder.core.observation import LayerScores
from larder.core.plan import Plan
from larder.core.spelling import name_of
from larder.policy.budgets.base import Budget, check_size, exceeds_total


@dataclass(frozen=True)
class CrossLayerBudget(Budget):
    """Layers share one pool of entries and wait for the last of them."""

    tokens: int | None = None
    kept: float | None = None

    def __post_init__(self) -> None:
        check_size(name_of(type(self)), self.tokens, self.kept)

    def due(self, held: Mapping[int, int], allowed: Mapping[int, int]) -> bool:
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
