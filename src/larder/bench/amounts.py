"""Budgets as studies write them: `1/8` of the full cache, `12.5%` of it, `512` tokens, `64MiB`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from larder.core.errors import UsageError

WHOLE = "1/1"  # how the budget of a policy that keeps everything is written
OWN = "own"  # that of a policy whose spelling has a size already
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)(?:\s*(/\s*\d+|%|[KMG]i?B))?\s*")


class Unit(Enum):
    """What an amount counts."""

    SHARE = "share"
    TOKENS = "tokens"
    BYTES = "bytes"


class Matched(Enum):
    """What is held equal between policies.

    BYTES: those that one question attends to, positions, columns and scales included.
    TOTAL: those of all caches together, with slow tiers and all episodes.
    TOKENS: entries per kv head of each cache.
    """

    BYTES = "bytes"
    TOTAL = "total"
    TOKENS = "tokens"


@dataclass(frozen=True)
class Amount:
    """A budget: a share of the full cache in (0, 1], or entries per kv head, or bytes."""

    number: float
    unit: Unit

    @staticmethod
    def parse(text: str) -> Amount:
        """Raises: UsageError: it is none of the four forms."""
        found = _PATTERN.fullmatch(text)
        number, unit = (found[1], (found[2] or "").replace(" ", "")) if found else ("0", "")
        if unit.startswith("/"):
            below = int(unit[1:])
            amount = Amount(float(Fraction(number) / below) if below else 0.0, Unit.SHARE)
        elif unit == "%":
            amount = Amount(float(number) / 100, Unit.SHARE)
        elif unit:
            amount = Amount(float(number) * _UNITS[unit], Unit.BYTES)
        else:
            amount = Amount(float(number) if "." not in number else 0.0, Unit.TOKENS)
        if amount.number <= 0 or (amount.unit is Unit.SHARE and amount.number > 1):
            raise UsageError(
                f"The budget {text!r} is no size: write 1/8 or 12.5% (of the full cache), 512 "
                "(tokens per kv head) or 64MiB."
            )
        return amount

    def tokens(self, context_tokens: int, bytes_per_token: int) -> int:
        """Entries per kv head, where nothing but keys and values is counted; at least 1."""
        if self.unit is Unit.TOKENS:
            return int(self.number)
        if self.unit is Unit.SHARE:
            return max(1, round(context_tokens * self.number))
        return max(1, int(self.number) // bytes_per_token)

    def bytes(self, full_bytes: int, bytes_per_token: int) -> int:
        """Of keys, values and all that is remembered of them."""
        if self.unit is Unit.SHARE:
            return int(full_bytes * self.number)
        return int(self.number * (bytes_per_token if self.unit is Unit.TOKENS else 1))


def by_size(budgets: list[str]) -> list[str]:
    """Largest first within a unit, shares before tokens before bytes, what is no amount last."""
    return sorted(budgets, key=_rank)


def _rank(text: str) -> tuple[int, float]:
    try:
        amount = Amount.parse("1/1" if text == "1" else text)
    except UsageError:
        return len(Unit), 0.0
    return list(Unit).index(amount.unit), -amount.number
