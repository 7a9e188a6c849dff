"""Scorer by position: the first tokens and the most recent ones (StreamingLLM).

Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), arXiv:2309.17453,
section 3. Differs from the paper: keys stay rotated at their true positions, unless the policy's
storage is `compact()`, which turns them to their place in the cache as the paper does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from larder.core.arguments import require
from larder.core.observation import Observation
from larder.core.plan import StepScore, StepScoring
from larder.core.types import Packed
from larder.policy.attention_reduction import AttentionReduction
from larder.policy.protect import ProtectedTokens
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class SinksAndWindow(Scorer):
    """StreamingLLM: recency, with the first tokens above everything.

    Args:
        sinks: tokens at the start of the sequence that always stay.
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        require(self.sinks >= 0, "sinks_and_window.sinks", "0 or more", self.sinks)

    def protected_tokens(self) -> ProtectedTokens:
        """The sinks, and the latest token."""
        return ProtectedTokens(self.sinks, 1)

    def score(self, observation: Observation) -> Packed:
        positions = observation.entries.packed_positions()
        return positions.float().masked_fill(positions < self.sinks, torch.inf)

    def step_scoring(self, reduction: AttentionReduction) -> StepScoring:
        return StepScoring(StepScore.POSITION, sinks=self.sinks)


Part = SinksAndWindow
