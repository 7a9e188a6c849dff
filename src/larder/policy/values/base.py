"""What every value rule can be asked: scores that also look at what an entry would say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from larder.core.observation import Observation
from larder.core.types import Packed, PackedMask


@dataclass(frozen=True)
class Selection:
    """What scores are for: how many entries may stay, and which do so anyway.

    Args:
        quota: entries per kv head that the layer may keep; 0 where nothing is chosen.
        protected: which entries stay whatever their scores; None for none.
        weights: mean attention weight of each entry, over the queries that judge and the query
            heads of its group; None where the rule does not ask for it.
    """

    quota: int = 0
    protected: PackedMask | None = None
    weights: Packed | None = None


NO_SELECTION = Selection()


class ValueRule(ABC):
    """Weighs scores by the entries' values. A frozen dataclass."""

    # Whether it asks what scores are for.
    selects: ClassVar[bool] = False
    # Whether it looks at what the output projection makes of values (`Seen.projection`).
    projects: ClassVar[bool] = False

    @property
    def wants_weights(self) -> bool:
        """Whether it asks for `Selection.weights`, which only scorers by attention have."""
        return False

    @abstractmethod
    def weigh(
        self, scores: Packed, seen: Observation, selection: Selection = NO_SELECTION
    ) -> Packed:
        """Scores of the same shape; infinities stay."""


def non_negative_weights(scores: Packed) -> Packed:
    """Numbers of 0 or more, 0 where a score is infinite.

    Scores that can be negative are no weights: the layer's lowest is then taken from all of them.
    """
    finite = scores.isfinite()
    lowest = min(float(scores[finite].min()), 0.0) if bool(finite.any()) else 0.0
    return (scores - lowest).masked_fill(~finite, 0.0)


def restore_infinities(scores: Packed, weighed: Packed) -> Packed:
    """What was weighed, with the infinite scores as they were."""
    return weighed.where(scores.isfinite(), scores)
