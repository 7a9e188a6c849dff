"""What every compensation can be asked: what becomes of the rejected."""

from __future__ import annotations

from abc import ABC, abstractmethod

from larder.core.observation import Entries
from larder.core.plan import Fate, Plan


class Compensation(ABC):
    """Turns a choice of entries into the plan that a cache carries out."""

    fate: Fate

    @abstractmethod
    def settle(self, plan: Plan, entries: Entries) -> Plan:
        """The plan with the rejected entries' fate added.

        Args:
            entries: what the layer holds before the plan is carried out.
        """
