"""Single entries as units.

No paper: the default. With `layers` neighboring layers keep the same entries, as methods need that
share what is found in one of them (MPCache, arXiv:2501.06807).
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.arguments import require
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.units.base import Unit


@dataclass(frozen=True)
class Token(Unit):
    """Single entries.

    Args:
        layers: consecutive layers that share the scores of the first of them.
    """

    layers: int = 1

    def __post_init__(self) -> None:
        require(self.layers >= 1, "token.layers", "at least 1", self.layers)

    @property
    def layers_together(self) -> int:
        return self.layers

    def pool(self, scores: Packed, observation: Observation) -> Packed:
        return scores


Part = Token
