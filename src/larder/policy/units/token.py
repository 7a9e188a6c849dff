"""Every entry stands for itself.

No paper: the default.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Seen
from larder.core.types import Packed
from larder.policy.units.base import Unit


@dataclass(frozen=True)
class Token(Unit):
    """Single entries."""

    def pool(self, scores: Packed, seen: Seen) -> Packed:
        del seen
        return scores


Part = Token
