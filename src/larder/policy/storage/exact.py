"""Storage of all entries at the precision of the model.

No paper: the default.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Entries, LayerScores
from larder.core.plan import Plan
from larder.policy.storage.base import Storage


@dataclass(frozen=True)
class Exact(Storage):
    """Unquantized entries."""

    def grade(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        return plan


Part = Exact
