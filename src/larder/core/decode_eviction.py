"""Eviction of a decode step as numbers, for policies that a kernel can carry out.

Parts name what they do (`Scorer.step_column`, `Budget.step_quota`, `Compensation.step_merging`);
the planner joins it where every other part leaves scores and plans as they are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepMerging:
    """Merging of rejected entries into the nearest kept one, above a moving threshold.

    Args:
        scalar: ledger scalar with the threshold of each kv head.
        rate: how fast the threshold follows, in (0, 1].
        slack: distance below the threshold at which an entry is still merged.
    """

    scalar: str
    rate: float
    slack: float


@dataclass(frozen=True)
class StepQuota:
    """Entries of a layer after a decode step; each kv head keeps its own best.

    Args:
        count: entries that each kv head keeps.
        protected_by: entries per kv head that protected shares are relative to.
    """

    count: int
    protected_by: int


@dataclass(frozen=True)
class StepRule:
    """Eviction by a column that attention is added to at every step.

    Args:
        column: ledger column with the score of each entry.
        merging: fate of rejected entries; None to drop them.
    """

    column: str
    merging: StepMerging | None
