"""A memory budget as people write it: `512` tokens, `20%` of the context, `64MiB`.

Every form is per cache: a policy that keeps one cache per episode holds as many budgets as it has
episodes, one of them on the device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from larder.core.errors import BudgetError, UsageError
from larder.core.spec import POSITION_BYTES, ModelSpec
from larder.core.spelling import spell
from larder.policy.budgets.base import Budget

DEFAULT = "20%"
DEFAULT_LEAST = 128  # tokens; a short text is kept whole unless a size was asked for
OPEN_END = "512"  # for a chat that starts from nothing
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|[KMG]i?B)?\s*")


@dataclass(frozen=True)
class Size:
    """A number with a unit: empty for tokens per kv head, `%` of the context, or bytes."""

    number: float
    unit: str

    @staticmethod
    def parse(text: str) -> Size:
        """Raises: UsageError: it is none of the three forms."""
        found = _PATTERN.fullmatch(text)
        if found is None or (found[2] is None and "." in found[1]):
            raise UsageError(
                f"--budget {text!r} is not a size: write 512 (tokens per head), 20% (of the "
                "context) or 64MiB; each is per cache."
            )
        size = Size(float(found[1]), found[2] or "")
        if size.number <= 0 or (size.unit == "%" and size.number > 100):
            raise UsageError(
                f"--budget {text!r} must be above 0, and a share at most 100%: write 512, 20% or "
                "64MiB."
            )
        return size

    def tokens(self, context_tokens: int, spec: ModelSpec) -> int:
        """Entries per kv head of one cache, averaged over managed layers."""
        if self.unit == "%":
            return max(1, round(context_tokens * self.number / 100))
        if self.unit in _UNITS:
            return int(self.number * _UNITS[self.unit]) // _entry_bytes(spec)
        return int(self.number)


def resolve(budget: Budget, asked: str | None, context_tokens: int, spec: ModelSpec) -> int:
    """Entries per kv head of one cache that a policy's budget comes to for a context.

    Args:
        asked: the command line's budget, for a spelling that leaves it open; None for 20% of the
            context, but no less than what a question and its surroundings need.

    Raises:
        UsageError: both the spelling and the command line name a size.
        BudgetError: nothing would be left.
    """
    if asked is not None and (budget.tokens is not None or budget.kept is not None):
        raise UsageError(
            f"--budget {asked} contradicts {spell(budget)} in the policy: give one of the two."
        )
    if budget.tokens is not None:
        return budget.tokens
    if budget.kept is not None:
        return max(1, round(context_tokens * budget.kept))
    if asked is None:
        return max(DEFAULT_LEAST, Size.parse(DEFAULT).tokens(context_tokens, spec))
    tokens = Size.parse(asked).tokens(context_tokens, spec)
    if tokens < 1:
        raise BudgetError(
            f"The budget of {asked} holds no token: one takes {_entry_bytes(spec)} bytes over all "
            "layers. Raise --budget."
        )
    return tokens


def resolve_open(budget: Budget, asked: str | None, spec: ModelSpec) -> int:
    """Entries per kv head where there is no context yet, as in a chat that starts from nothing.

    Raises:
        UsageError: the size is a share of the context.
    """
    is_given = budget.tokens is not None or budget.kept is not None or asked is not None
    size = asked if is_given else OPEN_END
    if budget.kept is not None or (size is not None and Size.parse(size).unit == "%"):
        share = spell(budget) if budget.kept is not None else f"--budget {size}"
        raise UsageError(
            f"{share} is a share of the context, but a chat that starts from nothing has none: "
            "give tokens (512) or bytes (64MiB)."
        )
    return resolve(budget, size, 0, spec)


def _entry_bytes(spec: ModelSpec) -> int:
    """Bytes of one token over all managed layers and heads, its position included."""
    heads = sum(layer.kv_heads for layer in spec.managed)
    return max(1, spec.managed_bytes_per_token() + heads * POSITION_BYTES)
