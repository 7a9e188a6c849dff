"""What studies hold equal between policies, and how they name budgets."""

from __future__ import annotations

from enum import Enum

from larder.core.amount import Amount, Unit
from larder.core.errors import UsageError

WHOLE = "1/1"  # how the budget of a policy that keeps everything is written
OWN = "own"  # that of a policy whose spelling has a size already


class MatchedQuantity(Enum):
    """What is held equal between policies.

    BYTES: those that one question attends to, positions, columns and scales included.
    TOTAL: those of all caches together, with slow tiers and all episodes.
    TOKENS: entries per kv head of each cache.
    """

    BYTES = "bytes"
    TOTAL = "total"
    TOKENS = "tokens"


def sort_budgets(budgets: list[str]) -> list[str]:
    """Largest first within a unit, shares before tokens before bytes, what is no amount last."""
    return sorted(budgets, key=_budget_rank)


def _budget_rank(text: str) -> tuple[int, float]:
    try:
        amount = Amount.parse("1/1" if text == "1" else text)
    except UsageError:
        return len(Unit), 0.0
    return list(Unit).index(amount.unit), -amount.number
