"""Storage in a cache form given by its name, at the precision of the model.

No paper: the way to a new cache form before a method of its own names it.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Entries, LayerScores
from larder.core.plan import Plan
from larder.policy.storage.base import Storage


@dataclass(frozen=True)
class Form(Storage):
    """Entries held by the named cache form, a file of `larder.cache.forms` without options.

    Args:
        name: the cache form.
    """

    name: str = "ragged"

    @property
    def form(self) -> str:
        return self.name

    def grade(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        return plan


Part = Form
