"""Memory budget in tokens, as a share of the context, or in bytes.

One grammar for the command line, Python, studies and the server: `512` (tokens per kv head),
`25%`, `1/4` or `0.25` (of the context), `25% min 64` (of the context, but at least 64 tokens),
`64MiB`. Python callers may also pass numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from larder.core.errors import UsageError

BINARY_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
UNITS = BINARY_UNITS | {"KB": 10**3, "MB": 10**6, "GB": 10**9}
SYNTAX = (
    "write 512 (tokens per kv head), 25%, 1/4 or 0.25 (of the context), 25% min 64 (but at least "
    "64 tokens), or 64MiB (bytes); each is per cache"
)
_PATTERN = re.compile(
    r"\s*(\d+(?:\.\d+)?)(?:\s*(/\s*\d+|%|[KMG]i?B|TiB))?(?:\s*,?\s*min\s*(\d+))?\s*"
)


def count_of_tokens(count: int) -> str:
    """Count of tokens in words, for messages: "1 token", "512 tokens"."""
    return f"{count} token{'' if count == 1 else 's'}"


class BudgetUnit(Enum):
    """Unit of a memory budget."""

    SHARE = "share"
    TOKENS = "tokens"
    BYTES = "bytes"


@dataclass(frozen=True)
class MemoryBudget:
    """Memory budget of one cache.

    Args:
        number: a share in (0, 1], entries per kv head averaged over layers, or bytes; above 0.
        unit: unit of `number`.
        min_tokens: entries per kv head that a share is at least.
    """

    number: float
    unit: BudgetUnit
    min_tokens: int = 0

    @staticmethod
    def parse(budget: str | int | float, name: str = "budget") -> MemoryBudget:
        """Budget from text or a number.

        Args:
            budget: `512`, `"512"`, `0.25`, `"1/4"`, `"25%"`, `"25% min 64"`, `"64MiB"`. A whole
                number counts tokens, a number with a decimal point is a share.
            name: of the argument or option, for errors.

        Raises:
            UsageError: `budget` has none of these forms, or another type.
        """
        if type(budget) not in (str, int, float):
            raise UsageError(f"{name} is a {type(budget).__name__}: {SYNTAX}.")
        text = repr(budget) if isinstance(budget, float) else str(budget)
        amount = _parse(text)
        if amount is None:
            raise UsageError(f"{name} {budget!r} is not a size: {SYNTAX}.")
        if amount.number <= 0 or (amount.unit is BudgetUnit.SHARE and amount.number > 1):
            raise UsageError(f"{name} {budget!r} must be above 0, and a share at most 1: {SYNTAX}.")
        if amount.min_tokens and amount.unit is not BudgetUnit.SHARE:
            raise UsageError(f"{name} {budget!r} has a min, which is for shares: {SYNTAX}.")
        return amount

    def tokens(self, context_tokens: int, bytes_per_token: int) -> int:
        """Entries per kv head, counting keys and values only; at least 1."""
        if self.unit is BudgetUnit.TOKENS:
            return int(self.number)
        if self.unit is BudgetUnit.SHARE:
            return max(1, self.min_tokens, round(context_tokens * self.number))
        return max(1, int(self.number) // bytes_per_token)

    def bytes(self, full_bytes: int, bytes_per_token: int) -> int:
        """Bytes of keys, values and their ledger columns."""
        if self.unit is BudgetUnit.SHARE:
            return max(int(full_bytes * self.number), self.min_tokens * bytes_per_token)
        return int(self.number * (bytes_per_token if self.unit is BudgetUnit.TOKENS else 1))


def _parse(text: str) -> MemoryBudget | None:
    match = _PATTERN.fullmatch(text)
    if match is None:
        return None
    number, unit = _measured(match[1], (match[2] or "").replace(" ", ""))
    return MemoryBudget(number, unit, int(match[3] or 0))


def _measured(number: str, unit: str) -> tuple[float, BudgetUnit]:
    if unit.startswith("/"):
        below = int(unit[1:])
        return float(Fraction(number) / below) if below else 0.0, BudgetUnit.SHARE
    if unit == "%":
        return float(number) / 100, BudgetUnit.SHARE
    if unit:
        return float(number) * UNITS[unit], BudgetUnit.BYTES
    return float(number), BudgetUnit.SHARE if "." in number else BudgetUnit.TOKENS
