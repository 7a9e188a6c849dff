"""What was read stays whole; what is generated has a budget of its own.

Wu et al., "SCOPE: Optimizing Key-Value Cache Compression in Long-context Generation" (2024),
arXiv:2412.13649. A share of the budget is for reading, the rest for what comes after, where
entries compete among themselves: `slide` lets them fill it all at once; `adaptive` starts at
`recent` entries and allows one more every `every` tokens; `discontinuous` does so too, and plans
only once `every` entries have piled up.

A budget counts both, as the paper's 2560 entries do; reading never fills more than its share. So
at 100 % of a context the preset `scope` reads 80 % of it: to read all of it whole, give the budget
that leaves as much for reading, 125 %, in tokens. The paper has what was read whole wherever it is
no longer than its 2048, which is the same rule.

The paper divides the tokens that are expected by the entries that are free to find `every`, and
its released code takes 15 where nobody says. The question is part of what was read there; here
it is read once generating has begun, and competes with the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from jaxtyping import Int
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.types import PackedMask
from larder.policy.timing.base import Timing


class Strategy(Enum):
    """How the room for generated tokens is given out."""

    SLIDE = "slide"
    ADAPTIVE = "adaptive"
    DISCONTINUOUS = "discontinuous"


@dataclass(frozen=True)
class Split(Timing):
    """Two budgets in one.

    Args:
        reading: share of the budget that reading may fill, in (0, 1); in the paper 2048 of 2560
            entries, or of 3072.
        strategy: `slide`, `adaptive` or `discontinuous`.
        recent: entries per head that generated tokens have from the start, under the strategies
            that grow.
        every: tokens per further entry, and between two plans of `discontinuous`.
    """

    reading: float = 0.8
    strategy: Strategy = Strategy.SLIDE
    recent: int = 256
    every: int = 15
    shields = True

    def __post_init__(self) -> None:
        if not 0 < self.reading < 1:
            raise BadParameter(
                f"split.reading must be a fraction between 0 and 1, got {self.reading}."
            )
        if self.recent < 1:
            raise BadParameter(f"split.recent must be at least 1 token, got {self.recent}.")
        if self.every < 1:
            raise BadParameter(f"split.every must be at least 1 token, got {self.every}.")

    def excess(self) -> int | None:
        return self.every - 1 if self.strategy is Strategy.DISCONTINUOUS else 0

    def reading_tokens(self, tokens: int) -> int:
        return max(1, int(self.reading * tokens))

    def quota(self, quota: int, tokens: int, step: int) -> int:
        free = tokens - self.reading_tokens(tokens)
        if self.strategy is Strategy.SLIDE:
            return quota + free
        return quota + min(free, self.recent + step // self.every)

    def room(self, tokens: int) -> int | None:
        return self.quota(0, tokens, 0)

    def shielded(
        self, protected: PackedMask, positions: Int[Tensor, " T"], start: int
    ) -> PackedMask:
        """What was read, too."""
        return protected | (positions < start)


Part = Split
