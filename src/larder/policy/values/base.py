"""Base class of value rules: scores weighted by the values of entries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from larder.core.observation import Observation
from larder.core.part import PolicyPart
from larder.core.types import Packed, PackedMask


@dataclass(frozen=True)
class Selection:
    """Selection that scores are computed for: its size and protected entries.

    Args:
        quota: capacity of the layer in entries per kv head; 0 without a selection.
        protected: entries that stay whatever their scores; None for none.
        weights: mean attention weight of each entry, over the observed queries and the query heads
            of its group; None where the rule does not need it.
    """

    quota: int = 0
    protected: PackedMask | None = None
    weights: Packed | None = None


NO_SELECTION = Selection()


class ValueRule(PolicyPart, ABC):
    """Weighting of scores by the values of entries. A frozen dataclass."""

    # Whether it needs a `Selection`.
    selects: ClassVar[bool] = False

    @property
    def wants_weights(self) -> bool:
        """True if it needs `Selection.weights`, which only attention scorers provide."""
        return False

    @abstractmethod
    def weigh(
        self, scores: Packed, observation: Observation, selection: Selection = NO_SELECTION
    ) -> Packed:
        """Weighted scores of the same shape; infinite scores do not change."""


def non_negative_weights(scores: Packed) -> Packed:
    """Scores as weights of at least 0; infinite scores become 0.

    Where a score is negative, the lowest of the layer is subtracted from all of them.
    """
    finite = scores.isfinite()
    lowest = min(float(scores[finite].min()), 0.0) if bool(finite.any()) else 0.0
    return (scores - lowest).masked_fill(~finite, 0.0)


def restore_infinities(scores: Packed, weighed: Packed) -> Packed:
    """Weighted scores with the infinite ones of `scores` restored."""
    return weighed.where(scores.isfinite(), scores)
