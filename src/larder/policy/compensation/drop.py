"""Eviction without compensation.

The rule of every plain eviction method; no paper of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Entries, LayerScores
from larder.core.plan import Plan
from larder.policy.compensation.base import Compensation


@dataclass(frozen=True)
class Drop(Compensation):
    """Rejected entries are dropped."""

    @property
    def is_step_rule(self) -> bool:
        return True

    def compensate(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        return plan


Part = Drop
