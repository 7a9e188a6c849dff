"""Scorer by a learned rate at which entries lose their worth, on one scale for all layers.

Bui et al., "Make Each Token Count: Towards Improving Long-Context Performance with KV Cache
Eviction" (2026), arXiv:2605.09649. `larder train global_retention` makes the gates. As `trim`, but
entries of all layers and heads compete for one budget, and the 32 latest tokens are exempt; here
4 sinks are, too: `whole() > global_retention() > global() > lagged()`.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class GlobalRetention(RetentionScorer):
    """Age times log beta."""

    needs = frozenset({"global_retention"})
    column = "global_retention"


Part = GlobalRetention
