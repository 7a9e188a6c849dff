"""The two ends of a sequence, where what always stays is found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProtectedTokens:
    """How many tokens stay whatever their scores.

    Args:
        first: tokens at the start of the sequence.
        last: the latest tokens.
    """

    first: int = 0
    last: int = 0

    @property
    def tokens(self) -> int:
        """Entries per head that they take up."""
        return self.first + self.last

    def joined(self, other: ProtectedTokens) -> ProtectedTokens:
        """What stays when both must: the same end is kept once."""
        return ProtectedTokens(max(self.first, other.first), max(self.last, other.last))
