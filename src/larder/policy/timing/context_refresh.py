"""Refresh of the kept context while text is generated, by layers of falling share (PyramidInfer).

Yang et al., "PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference" (2024),
arXiv:2405.12532, its generation phase: the latest tokens are recent and stay. Once 16 generated
tokens have piled up behind them, the recent ones judge these 16, and a share stays for good: 0.9
times one that falls along half a cosine from 1 in the first layer to 0.1 behind the last, and at
least one. What was read, and what stayed before, is not judged again. Numbers, shares and the order
of events are the released code's.

There the cache grows without end. Here `reading` of the budget is for what is read, and the rest
for what is generated: once that is full, what stayed earlier is judged as well, and as many leave
as come. The recent tokens are a share of that room (a fifth of the text so far in the paper), and a
question that is read behind the text counts as generated. They judge by `scorer`, in the paper by
attention averaged over heads, the latest of them counting 1.2 times the first. In a chat what
earlier turns left counts as read while it fits its share; from then on all of it is judged. Under a
budget that layers share they compete for what stays of a round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Int
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import BadParameter, SpellingError, UnknownName
from larder.core.types import PackedMask
from larder.policy.scorers.base import ReducedScorer
from larder.policy.timing.base import Growth, Timing, count_or_share

EVEN = 1e-9  # 100 * 0.29 is a little less than 29


@dataclass(frozen=True)
class ContextRefresh(Timing):
    """Plan for every `tokens` generated tokens behind the recent ones, over these alone.

    Args:
        tokens: generated tokens that are judged together.
        kept: share of them that stays in the first layer, in (0, 1].
        share: what remains of that share behind the last layer, in (0, 1].
        recent: the latest generated tokens, which stay. A whole number is tokens, a fraction in
            (0, 1) that share of the room for generated tokens.
        reading: share of the budget that reading may fill, in (0, 1).
        scorer: what judges, with an aggregation and a head rule behind it if its paper's are not
            wanted.
    """

    tokens: int = 16
    kept: float = 0.9
    share: float = 0.1
    recent: int | float = 0.5
    reading: float = 0.8
    scorer: str = "recent_attention()"
    extends_protection = True
    varies_by_layer = True

    def __post_init__(self) -> None:
        require(self.tokens >= 1, "context_refresh.tokens", "at least 1", self.tokens)
        for name in ("kept", "share"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise BadParameter(
                    f"context_refresh.{name} must be a fraction in (0, 1], got {value}."
                )
        if not 0 < self.reading < 1:
            raise BadParameter(
                f"context_refresh.reading must be a fraction between 0 and 1, got {self.reading}."
            )
        is_share = isinstance(self.recent, float)
        if not (0 < self.recent < 1 if is_share else self.recent >= 1):
            raise BadParameter(
                "context_refresh.recent must be tokens (at least 1) or a fraction between 0 and 1, "
                f"got {self.recent}."
            )
        try:
            ReducedScorer.parse(self.scorer)
        except (SpellingError, UnknownName) as error:
            raise BadParameter(f"context_refresh.scorer must be a scorer: {error}") from None

    @cached_property
    def _scoring(self) -> ReducedScorer:
        return ReducedScorer.parse(self.scorer)

    @property
    def scoring(self) -> ReducedScorer | None:
        return self._scoring

    def excess(self) -> int | None:
        return 0

    def prefill_tokens(self, tokens: int) -> int:
        return max(1, int(self.reading * tokens))

    def recent_tokens(self, tokens: int) -> int:
        """The latest generated tokens that stay, under a budget of `tokens` entries per head."""
        return count_or_share(self.recent, tokens - self.prefill_tokens(tokens))

    def generation_capacity(self, tokens: int) -> int | None:
        return tokens - self.prefill_tokens(tokens)

    def survivors(self, depth: float) -> int:
        """Tokens that stay of those that are judged together, in a layer at a depth in [0, 1)."""
        kept = (1 - self.share) * (math.cos(math.pi * depth) + 1) / 2 + self.share
        return max(1, int(self.tokens * self.kept * kept + EVEN))

    def layer_quota(self, quota: int, tokens: int, growth: Growth) -> int:
        """Capacity that follows the rounds so far: full between two, and cut at each."""
        rounds, pending = self._course(growth.appended, tokens)
        recent = min(growth.appended, self.recent_tokens(tokens))
        held = recent + rounds * self.survivors(growth.depth) + pending
        return quota + min(held, tokens - self.prefill_tokens(tokens))

    def generation_protection(
        self,
        protected: PackedMask,
        positions: Int[Tensor, " T"],
        start: int,
        length: int,
        tokens: int,
    ) -> PackedMask:
        """Protected entries, what was read, the latest tokens, and what stayed while there is room.

        All but the tokens that are judged in this round.
        """
        appended, recent = length - start, self.recent_tokens(tokens)
        free = tokens - self.prefill_tokens(tokens)
        rounds, pending = self._course(appended, tokens)
        if recent + pending > free:
            pending = 0  # no room to wait for the end of a round
        behind = length - recent - pending  # the first that is not judged yet
        stays = protected | (positions < start) | (positions >= behind)
        if recent + rounds * self.survivors(0.0) + pending <= free:
            stays |= positions < behind - self.tokens
        return stays

    def _course(self, appended: int, tokens: int) -> tuple[int, int]:
        """Rounds so far, and tokens that wait for the next, behind the recent ones."""
        return divmod(max(0, appended - self.recent_tokens(tokens)), self.tokens)


Part = ContextRefresh
