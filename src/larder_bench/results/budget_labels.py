"""Matched quantities between policies, and labels of budgets."""

from __future__ import annotations

from enum import Enum

from larder.core import BudgetUnit, MemoryBudget, UsageError

WHOLE = "1/1"  # budget of a policy that keeps everything
OWN = "own"  # budget of a policy whose spelling contains a size


class MatchedQuantity(Enum):
    """Quantity that is equal for all compared policies.

    BYTES: bytes that one question attends to, positions, columns and scales included.
    TOTAL: bytes of all caches together, with slow tiers and all episodes.
    TOKENS: entries per kv head of each cache.
    """

    BYTES = "bytes"
    TOTAL = "total"
    TOKENS = "tokens"


def sort_budgets(budgets: list[str]) -> list[str]:
    """Budgets sorted largest first within a unit: shares, tokens, bytes, then labels that are no
    amount.
    """
    return sorted(budgets, key=_budget_rank)


def _budget_rank(text: str) -> tuple[int, float]:
    try:
        amount = MemoryBudget.parse("1/1" if text == "1" else text)
    except UsageError:
        return len(BudgetUnit), 0.0
    return list(BudgetUnit).index(amount.unit), -amount.number
