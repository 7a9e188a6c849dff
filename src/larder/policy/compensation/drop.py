"""What is rejected is gone.

The rule of every plain eviction method; no paper of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Entries
from larder.core.plan import Fate, Plan
from larder.policy.compensation.base import Compensation


@dataclass(frozen=True)
class Drop(Compensation):
    """Forget the rejected entries."""

    fate = Fate.DROP

    def settle(self, plan: Plan, entries: Entries) -> Plan:
        del entries
        return plan


Part = Drop
