"""Scorer by persistence of importance: entries stay that few queries found unimportant.

Liu et al., "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache
Compression at Test Time" (2023), arXiv:2305.17118, algorithm 2. Latest tokens are for `protect`
(10 in the paper), and the drop of many entries at once for `lagged`.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class Persistence(Scorer):
    """Minus the number of queries that gave the entry less than an even share."""

    tallies = frozenset({"persistence"})

    def score(self, observation: Observation) -> Packed:
        return -observation.entries.column("unimportant")


Part = Persistence
