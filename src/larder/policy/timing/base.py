"""Base class of timings: when plans are made during decode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from larder.core.part import PolicyPart
from larder.core.types import PackedMask
from larder.policy.scorers.base import ReducedScorer, Scorer


@dataclass(frozen=True)
class Growth:
    """Growth of a cache since it was prefilled.

    Args:
        step: tokens generated so far.
        appended: tokens read or generated so far, those of the pass included.
        depth: layers before this one as a fraction of all, in [0, 1).
    """

    step: int
    appended: int
    depth: float


class Timing(PolicyPart, ABC):
    """Eviction schedule of the decode phase. A frozen dataclass."""

    extends_protection: ClassVar[bool] = False  # whether decode protects more
    varies_by_layer: ClassVar[bool] = False  # whether `layer_quota` is more than `quota`

    @property
    def scoring(self) -> ReducedScorer | None:
        """Scorer and reduction of the decode phase; None for the policy's own."""
        return None

    @property
    def parts(self) -> tuple[PolicyPart, ...]:
        """Parts of the decode phase that read inputs; empty for the policy's own."""
        scoring = self.scoring
        return () if scoring is None else (scoring.scorer, scoring.reduction.heads)

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        """Scorer of the decode phase; empty for the policy's own."""
        return () if self.scoring is None else (self.scoring.scorer,)

    def with_budget(self, tokens: int) -> Timing:
        """Copy with open parameters filled in for a budget of `tokens` entries per kv head."""
        return self

    @abstractmethod
    def excess(self) -> int | None:
        """Entries per kv head beyond the budget that are allowed before a plan is made.

        0 plans at every step; None plans at the ends of blocks and turns only.
        """

    def prefill_tokens(self, tokens: int) -> int:
        """Part of a budget of `tokens` entries per head that prefill may fill; all by default."""
        return tokens

    def quota(self, quota: int, tokens: int, step: int) -> int:
        """Capacity of a layer at a decode step, in entries per kv head.

        Args:
            quota: capacity of the layer in prefill.
            tokens: M, the budget that prefill and decode together must not exceed on average.
            step: tokens generated so far.
        """
        return quota

    def layer_quota(self, quota: int, tokens: int, growth: Growth) -> int:
        """Capacity of a layer at a decode step, as `quota`; that of the step by default."""
        return self.quota(quota, tokens, growth.step)

    def generation_capacity(self, tokens: int) -> int | None:
        """Entries per kv head reserved for generated text at the first step, under a budget of
        `tokens`.

        None without a reservation: generated tokens compete with the prompt.
        """
        del tokens

    def generation_protection(
        self,
        protected: PackedMask,
        positions: Int[Tensor, " T"],
        start: int,
        length: int,
        tokens: int,
    ) -> PackedMask:
        """Protected entries during decode, at least those of prefill.

        Args:
            start: true position of the first generated token.
            length: true tokens so far.
            tokens: M, as in `quota`.
        """
        return protected


def count_or_share(amount: int | float, total: int) -> int:
    """Tokens of `total`: a whole number counts them, a fraction is a share of at least one."""
    return min(amount, total) if isinstance(amount, int) else max(1, int(amount * total))
