"""Scorer by recurrence intervals: entries that are due to be needed again (LazyEviction).

Zhang et al., "LazyEviction: Lagged KV Eviction with Attention Pattern Observation for Efficient
Long Reasoning" (2025), arXiv:2506.15969: an entry scores high while the time since it was last
needed is short beside the longest interval that it ever went between two needs, and higher where
these intervals are short. The formula is that of the released code, which adds 1 inside the first
sigmoid. Latest tokens are for `protect`, rare decisions for `lagged`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.scorers.base import Scorer

NEVER = 1e-5  # the interval of an entry that was never needed again, in tokens


@dataclass(frozen=True)
class Recurrence(Scorer):
    """2 sigmoid(-1 - waited / gap) + 2 sigmoid(1 - gap), the latter 0 where there is no gap."""

    tallies = frozenset({"recurrence"})

    def score(self, observation: Observation) -> Packed:
        gap = observation.entries.column("longest_gap")
        waited = observation.length - 1 - observation.entries.column("last_needed")
        due = torch.sigmoid(-1 - waited / (gap + NEVER))
        often = torch.where(gap > 0, torch.sigmoid(1 - gap), 0.0)
        return 2 * (due + often)


Part = Recurrence
