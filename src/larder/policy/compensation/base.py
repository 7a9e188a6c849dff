"""What every compensation can be asked: what becomes of the rejected."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from larder.core.ledger import Ledger
from larder.core.observation import Entries, LayerScores
from larder.core.plan import Plan


class Compensation(ABC):
    """Turns a choice of entries into the plan that a cache carries out."""

    ledger: ClassVar[Ledger] = Ledger()  # what it has the cache remember
    parks: ClassVar[bool] = False  # whether what is rejected goes to a slow tier
    # Names of the tallies whose columns it reads.
    tallies: ClassVar[frozenset[str]] = frozenset()

    def remembered(self) -> Ledger:
        """What it, with these parameters, has the cache remember."""
        return self.ledger

    def required_tallies(self) -> frozenset[str]:
        """Names of the tallies whose columns it, with these parameters, reads."""
        return self.tallies

    @property
    def once(self) -> bool:
        """Whether it judges a text as one, so that it must be read before anything goes."""
        return False

    @property
    def separates_streaming_heads(self) -> bool:
        """Whether it does with retrieval heads other than with streaming heads."""
        return False

    def under(self, tokens: int) -> Compensation:
        """The same under a budget of `tokens` entries per kv head."""
        del tokens
        return self

    @abstractmethod
    def settle(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        """The plan with the rejected entries' fate added.

        Args:
            entries: what the layer holds before the plan is carried out.
            scored: how its entries were judged.
        """
