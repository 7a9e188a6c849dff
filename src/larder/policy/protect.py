"""Protection of the first and the latest tokens from eviction.

No paper of its own: many methods keep one or both beside the entries that they select.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import BadParameter, BudgetError
from larder.core.memory_budget import count_of_tokens
from larder.core.types import PackedMask
from larder.ops.packing import mask_outside


@dataclass(frozen=True)
class Protect:
    """Sinks and recent tokens, kept inside the budget.

    Args:
        sinks: tokens at the start of the sequence.
        recent: latest tokens; a whole number counts tokens, a fraction in (0, 1) is a share of the
            budget, under `inverse_variance` and `squeeze` of each layer's own part of it.
    """

    sinks: int = 4
    recent: int | float = 32

    def __post_init__(self) -> None:
        require(self.sinks >= 0, "protect.sinks", "0 or more", self.sinks)
        if not 0 <= self.recent or (isinstance(self.recent, float) and self.recent >= 1):
            raise BadParameter(
                f"protect.recent must be tokens (0 or more) or a fraction below 1, "
                f"got {self.recent}."
            )

    def recent_tokens(self, tokens: int) -> int:
        """Number of protected latest tokens under a budget of `tokens` entries per head."""
        return int(self.recent * tokens) if isinstance(self.recent, float) else self.recent

    def ends(self, tokens: int) -> ProtectedTokens:
        """Protected tokens of every head under a budget of `tokens`, even where they do not fit."""
        return ProtectedTokens(self.sinks, self.recent_tokens(tokens))

    def least(self, tokens: int) -> ProtectedTokens:
        """Protected tokens of every head under a budget of `tokens`.

        Raises:
            BudgetError: they do not fit.
        """
        least = self.ends(tokens)
        if least.tokens > tokens:
            raise BudgetError(
                f"The budget of {count_of_tokens(tokens)} is smaller than sinks + recent = "
                f"{least.first} + {least.last}, which always stay: raise the budget, or lower "
                "protect(sinks, recent). A share is of the text that is read: for a short text "
                "give it a min, such as '25% min 64', a budget in tokens (512), or leave it out "
                "(20%, at least 128)."
            )
        return least

    def mask(self, positions: Int[Tensor, " T"], length: int, tokens: int) -> PackedMask:
        """Mask of entries at protected positions, after `length` true tokens."""
        return mask_outside(positions, self.sinks, length - self.recent_tokens(tokens))


Part = Protect


@dataclass(frozen=True)
class ProtectedTokens:
    """Numbers of first and latest tokens that stay whatever their scores.

    Args:
        first: tokens at the start of the sequence.
        last: latest tokens.
    """

    first: int = 0
    last: int = 0

    @property
    def tokens(self) -> int:
        """Entries per head that they occupy."""
        return self.first + self.last

    def union(self, other: ProtectedTokens) -> ProtectedTokens:
        """Union of two protections: the larger number at either end."""
        return ProtectedTokens(max(self.first, other.first), max(self.last, other.last))
