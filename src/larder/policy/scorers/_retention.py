"""Worth of an entry that decays by a learned factor with every token that follows."""

from __future__ import annotations

from typing import ClassVar

from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.scorers.base import Scorer


class RetentionScorer(Scorer):
    """Base of scorers by beta^age, in logarithms: age times the column that a gate wrote.

    The age is that at the next token, so that the latest entry has an age of 1.
    """

    column: ClassVar[str]

    def score(self, observation: Observation) -> Packed:
        ages = observation.length - observation.entries.packed_positions()
        return observation.entries.column(self.column) * ages
