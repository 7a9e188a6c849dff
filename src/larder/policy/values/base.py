"""What every value rule can be asked: scores that also look at what an entry would say."""

from __future__ import annotations

from abc import ABC, abstractmethod

from larder.core.observation import Seen
from larder.core.types import Packed


class ValueRule(ABC):
    """Weighs scores by the entries' values. A frozen dataclass."""

    @abstractmethod
    def weigh(self, scores: Packed, seen: Seen) -> Packed:
        """Scores of the same shape; infinities stay."""
