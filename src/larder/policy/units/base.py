"""What every unit can be asked: which entries stay or go together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from larder.core.observation import Observation
from larder.core.types import Packed


class Unit(ABC):
    """Gives entries that belong together one score. A frozen dataclass."""

    # Names of the tallies whose columns it reads, and of the sets of token ids that these ask for.
    tallies: ClassVar[frozenset[str]] = frozenset()
    lexicon: ClassVar[frozenset[str]] = frozenset()

    @property
    def layers_together(self) -> int:
        """How many consecutive managed layers share the scores of their first; 1 shares none.

        Only layers share whose heads hold the same positions.
        """
        return 1

    @abstractmethod
    def pool(self, scores: Packed, seen: Observation) -> Packed:
        """Scores of the same shape, equal within a unit; infinities stay where they are."""
