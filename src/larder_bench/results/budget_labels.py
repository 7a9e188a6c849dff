"""Matched quantities between policies, and labels of budgets."""

from __future__ import annotations

from enum import Enum

from larder.core.errors import UsageError
from larder.core.memory_budget import BudgetUnit, MemoryBudget

WHOLE = "1/1"  # how the budget of a policy that keeps everything is written
OWN = "own"  # that of a policy whose spelling has a size already


class MatchedQuantity(Enum):
    """Quantity that is equal for all compared policies.

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
        amount = MemoryBudget.parse("1/1" if text == "1" else text)
    except UsageError:
        return len(BudgetUnit), 0.0
    return list(BudgetUnit).index(amount.unit), -amount.number
