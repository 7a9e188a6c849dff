"""Scorer by attention from the last queries of the context (SnapKV).

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (2024),
arXiv:2404.14469, section 4 (window 32, max pooling over 7 in the authors' main setting). Query
heads that share a kv head vote together: sums of their softmax weights, so one score per kv head.

`pool="mean"` smooths by the average, as the released code of CAKE (arXiv:2503.12491) and of
CompressKV (arXiv:2508.02401) does, both over 5: what stands beyond the ends counts as 0.

`variant="code"` is the adaptation that EpiCache compares with (arXiv:2509.17396, appendix): the
last `window` tokens of each block are read once more as a prompt, an entry's score is its highest
weight, nothing is pooled, and nothing protects the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import Observation, Prompts, ScratchPrompt
from larder.core.types import Packed, TokenIds, Variant
from larder.ops.pooling import running_max, running_mean
from larder.policy.attention_reduction import ObservationWindow
from larder.policy.protect import ProtectedTokens
from larder.policy.scorers.base import AttentionScorer


class Pool(Enum):
    """Pooling over neighboring entries."""

    MAX = "max"
    MEAN = "mean"


@dataclass(frozen=True)
class SnapKV(AttentionScorer):
    """Attention from the last `window` queries, summed, then smoothed over `kernel` positions.

    Args:
        window: queries that vote, in tokens. They always stay themselves.
        kernel: width of the pooling, in entries. Odd; 1 pools nothing. Neighbors are those that
            survived: after an eviction they may have been far apart.
        pool: `max` or `mean` of the neighbors.
        variant: `larder` and `paper` as published, `code` as EpiCache runs it.
    """

    window: int = 32
    kernel: int = 7
    pool: Pool = Pool.MAX
    variant: Variant = Variant.LARDER

    def __post_init__(self) -> None:
        require(self.window >= 1, "snapkv.window", "at least 1 token", self.window)
        require(self.kernel >= 1 and self.kernel % 2 == 1, "snapkv.kernel", "odd", self.kernel)

    def scratch(self, block: TokenIds, start: int, prompts: Prompts) -> tuple[ScratchPrompt, ...]:
        if self.variant is not Variant.CODE:
            return ()
        return (ScratchPrompt(block[-self.window :], (0, start + len(block))),)

    def default_reduction(self) -> tuple[str, str]:
        return ("max", "group_max") if self.variant is Variant.CODE else ("sum", "group_sum")

    def observation_window(self, observation: Observation) -> ObservationWindow:
        if self.variant is Variant.CODE:
            return ObservationWindow(observation.queries, observation.entries)
        voters = observation.query_positions[-self.window :]
        return ObservationWindow(
            observation.queries[:, -self.window :], observation.entries, voters, int(voters[0])
        )

    def finish(self, observation: Observation, heads: list[Float[Tensor, " _"]]) -> Packed:
        votes = torch.cat(heads)
        if self.variant is Variant.CODE:
            return votes
        is_voter = (
            observation.entries.packed_positions() >= observation.query_positions[-self.window :][0]
        )
        votes = votes.masked_fill(is_voter, 0.0)  # the window's own votes would leak when pooled
        parts = torch.split(votes, list(observation.entries.lengths))
        smooth = running_max if self.pool is Pool.MAX else running_mean
        pooled = torch.cat([smooth(head, self.kernel) for head in parts])
        return pooled.masked_fill(is_voter, torch.inf)

    def protected_tokens(self) -> ProtectedTokens:
        """The window that votes."""
        return (
            ProtectedTokens() if self.variant is Variant.CODE else ProtectedTokens(last=self.window)
        )


Part = SnapKV
