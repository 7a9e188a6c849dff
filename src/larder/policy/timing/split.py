"""Separate budgets for prompt and generated tokens (SCOPE).

Wu et al., "SCOPE: Optimizing Key-Value Cache Compression in Long-context Generation" (2024),
arXiv:2412.13649. A share of the budget is for reading, the rest for what comes after, where
entries compete among themselves beside the `recent` latest, which stay: `slide` lets them fill it
all at once; `adaptive` starts at `recent` entries and allows one more every `every` tokens;
`discontinuous` does so too, and plans only once `every` entries have piled up.

What is read is cut by the policy's own scorer, as a prompt is anywhere else; `scorer` names another
one for what is generated. The released code takes the weights of the newest query alone, not
smoothed: `scorer="last_query() > sum() > group_mean()"`.

A budget counts both, as the paper's 2560 entries do; reading never fills more than its share. So
at 100 % of a context the preset `scope` reads 80 % of it: to read all of it whole, give the budget
that leaves as much for reading, 125 %, in tokens. The paper has what was read whole wherever it is
no longer than its 2048, which is the same rule.

The paper divides the tokens that are expected by the entries that are free to find `every`, which
`expected` does here; its released code takes 15 by default, and so do we. The question is
part of what was read there; here it is read once generating has begun, and competes with the
answer. In a chat what earlier turns left counts as read while it fits the share of reading; from
then on all of it competes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

from jaxtyping import Int
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import BadParameter, SpellingError, UnknownName
from larder.core.types import PackedMask
from larder.policy.scorers.base import ReducedScorer
from larder.policy.timing.base import Timing, count_or_share

EVERY_TOKENS = 15  # where neither `every` nor `expected` is given, as in the released code


class Strategy(Enum):
    """Growth of the capacity for generated tokens."""

    SLIDE = "slide"
    ADAPTIVE = "adaptive"
    DISCONTINUOUS = "discontinuous"


@dataclass(frozen=True)
class Split(Timing):
    """Two budgets in one: for prefill and for decode.

    Args:
        reading: share of the budget that reading may fill, in (0, 1); in the paper 2048 of 2560
            entries, or of 3072.
        strategy: `slide`, `adaptive` or `discontinuous`.
        recent: the latest generated tokens, which stay; under the strategies that grow all that
            there is room for at the start. A whole number is tokens, a fraction in (0, 1) that
            share of the room for generated tokens; in the paper 128 of 1024.
        every: tokens per further entry, and between two plans of `discontinuous`; left open, what
            follows from `expected`, or 15.
        expected: tokens that will be generated.
        scorer: what scores while text is generated, with an aggregation and a head rule behind it
            if its paper's are not wanted; by default the policy's own scorer.
    """

    reading: float = 0.8
    strategy: Strategy = Strategy.SLIDE
    recent: int | float = 0.125
    every: int | None = None
    expected: int | None = None
    scorer: str | None = None
    extends_protection = True

    def __post_init__(self) -> None:
        require(0 < self.reading < 1, "split.reading", "a fraction between 0 and 1", self.reading)
        is_share = isinstance(self.recent, float)
        if not (0 < self.recent < 1 if is_share else self.recent >= 1):
            raise BadParameter(
                "split.recent must be tokens (at least 1) or a fraction between 0 and 1, "
                f"got {self.recent}."
            )
        for name in ("every", "expected"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise BadParameter(f"split.{name} must be at least 1 token, got {number}.")
        if self.every is not None and self.expected is not None:
            raise BadParameter(
                f"split was given every={self.every} and expected={self.expected}: give one."
            )
        if self.scorer is not None:
            try:
                ReducedScorer.parse(self.scorer)
            except (SpellingError, UnknownName) as error:
                raise BadParameter(f"split.scorer must be a scorer: {error}") from None

    @property
    def scoring(self) -> ReducedScorer | None:
        return None if self.scorer is None else _parse_scoring(self.scorer)

    def with_budget(self, tokens: int) -> Split:
        """Copy with `every` filled in from the tokens that are expected."""
        if self.expected is None:
            return self
        free = tokens - self.prefill_tokens(tokens)
        recent = self.recent_tokens(tokens)
        every = max(1, (self.expected - recent) // max(1, free - recent))
        return replace(self, every=every, expected=None)

    def recent_tokens(self, tokens: int) -> int:
        """The latest generated tokens that stay, under a budget of `tokens` entries per head."""
        return count_or_share(self.recent, tokens - self.prefill_tokens(tokens))

    def excess(self) -> int | None:
        return self._every - 1 if self.strategy is Strategy.DISCONTINUOUS else 0

    @property
    def _every(self) -> int:
        return EVERY_TOKENS if self.every is None else self.every

    def prefill_tokens(self, tokens: int) -> int:
        return max(1, int(self.reading * tokens))

    def quota(self, quota: int, tokens: int, step: int) -> int:
        free = tokens - self.prefill_tokens(tokens)
        if self.strategy is Strategy.SLIDE:
            return quota + free
        return quota + min(free, self.recent_tokens(tokens) + step // self._every)

    def generation_capacity(self, tokens: int) -> int | None:
        return self.quota(0, tokens, 0)

    def generation_protection(
        self,
        protected: PackedMask,
        positions: Int[Tensor, " T"],
        start: int,
        length: int,
        tokens: int,
    ) -> PackedMask:
        """Protected entries, the prompt, and the latest tokens."""
        latest = length - self.recent_tokens(tokens)
        return protected | (positions < start) | (positions >= latest)


@cache
def _parse_scoring(sentence: str) -> ReducedScorer:
    return ReducedScorer.parse(sentence)


Part = Split
