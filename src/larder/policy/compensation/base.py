"""Base class of compensations: the fate of rejected entries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from larder.core.observation import Entries, LayerScores
from larder.core.part import PolicyPart
from larder.core.plan import Plan, StepMerging, StepSpreading
from larder.core.spec import LayerSpec, RecomputeSpec


class Compensation(PolicyPart, ABC):
    """Fate of rejected entries: dropped, merged or offloaded. A frozen dataclass."""

    offloads: ClassVar[bool] = False  # whether rejected entries are offloaded to a slow tier
    sums_rejected: ClassVar[bool] = False  # whether the cache form adds them to a state
    # Name of the cache form that rejected entries need; None for the one of the storage.
    cache_form: ClassVar[str | None] = None

    @property
    def merges_apart(self) -> bool:
        """True if keys and values of an entry are merged by different weights."""
        return False

    @property
    def is_step_rule(self) -> bool:
        """True if `step_merging` is all that happens to entries rejected in a decode step."""
        return False

    @property
    def step_merging(self) -> StepMerging | StepSpreading | None:
        """Merging of entries rejected in a decode step; None for entries that are dropped."""
        return None

    @property
    def rebuilding(self) -> RecomputeSpec | None:
        """Recomputation of rejected entries; None without one."""
        return None

    @property
    def needs_whole_text(self) -> bool:
        """True if the whole text must be read before anything is evicted."""
        return False

    @property
    def separates_streaming_heads(self) -> bool:
        """True if retrieval heads and streaming heads are treated differently."""
        return False

    @property
    def added_entries(self) -> int:
        """Exact entries per kv head that a plan adds to those that stay, and the budget's count."""
        return 0

    def state_entries(self, layer: LayerSpec, itemsize: int) -> int:
        """Entries per kv head whose bytes its state of rejected entries takes from the budget.

        Args:
            itemsize: bytes of a number of an entry.
        """
        return 0

    def with_budget(self, tokens: int) -> Compensation:
        """Copy with open parameters filled in for a budget of `tokens` entries per kv head."""
        return self

    @abstractmethod
    def compensate(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        """Plan with the fate of rejected entries added.

        Args:
            plan: entries that the budget chose.
            entries: entries of the layer before the plan.
            scored: scores of the entries.
        """
