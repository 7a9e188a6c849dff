"""What is rejected goes to a slow tier, and comes back when a query needs it.

Mao, Wang, Ester, Li, "IceCache: Memory-efficient KV-cache Management for Long-Sequence LLMs"
(2026), arXiv:2604.10539, does so with all but the first and latest tokens. Any scorer can stand
before it: what it scores highest stays in the fast tier, and the recall part of the policy finds
the rest. Nothing is lost: a text is read with attention to all of it, whatever the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.errors import BadParameter
from larder.core.observation import Entries, Scored
from larder.core.plan import Plan
from larder.policy.compensation.base import Compensation


@dataclass(frozen=True)
class Park(Compensation):
    """Park the rejected entries in host memory.

    Args:
        host_mib: the most that they may take there, in MiB per cache; left open, as much as the
            machine has.
    """

    host_mib: int | None = None
    folds = False
    parks = True

    def __post_init__(self) -> None:
        if self.host_mib is not None and self.host_mib < 1:
            raise BadParameter(f"park.host_mib must be at least 1 MiB, got {self.host_mib}.")

    def settle(self, plan: Plan, entries: Entries, scored: Scored) -> Plan:
        del entries, scored
        return plan


Part = Park
