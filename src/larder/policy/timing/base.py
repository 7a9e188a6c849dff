"""What every timing can be asked: when plans are made while text is generated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from larder.core.types import PackedMask
from larder.policy.scorers.base import Scorer
from larder.policy.scoring import Scoring


class Timing(ABC):
    """Says whether and when entries go while generating. A frozen dataclass."""

    extends_protection: ClassVar[bool] = False  # whether `shielded` protects anything

    @property
    def scoring(self) -> Scoring | None:
        """What scores while text is generated; None where that is the policy's own scorer."""
        return None

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        """Its scorer; none where the policy's own goes on."""
        return () if self.scoring is None else (self.scoring.scorer,)

    @property
    def calibrations(self) -> frozenset[str]:
        """Names of the measurements of the model that `scoring` looks up."""
        own = self.scoring
        return frozenset() if own is None else own.reduction.heads.calibrations

    def under(self, tokens: int) -> Timing:
        """The same under a budget of `tokens` entries per kv head."""
        del tokens
        return self

    @abstractmethod
    def excess(self) -> int | None:
        """Entries per kv head that may pile up beyond the budget before a plan is made.

        0 plans at every step; None at the ends of blocks and turns alone.
        """

    def prefill_tokens(self, tokens: int) -> int:
        """How much of a budget of `tokens` entries per head reading may fill; all by default."""
        return tokens

    def quota(self, quota: int, tokens: int, step: int) -> int:
        """Entries per kv head that a layer may hold at a step of generation.

        Args:
            quota: what the layer was given for reading.
            tokens: M, the budget that both together must not exceed on average.
            step: tokens generated so far.
        """
        del tokens, step
        return quota

    def room(self, tokens: int) -> int | None:
        """Entries per kv head that generated text has from the start, under a budget of `tokens`.

        None where it has none of its own and competes with what was read.
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
        """What is protected while generating: more than while reading, perhaps.

        Args:
            start: true position where generating began.
            length: true tokens so far.
            tokens: M, as in `quota`.
        """
        del positions, start, length, tokens
        return protected
