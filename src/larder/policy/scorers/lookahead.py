"""Scorer by attention from tokens that the model drafts (Lookahead Q-Cache).

Wang et al., "Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query"
(2025), arXiv:2505.20334 (LAQ). A few tokens are decoded greedily behind the context and then
discarded; entries that their queries attend to stay. As in the released code, weights are shared
among cached entries only and summed over the drafted queries, then pooled by maximum.

Differs: the paper drafts over a small SnapKV cache of its own, to spare time; here over all that is
held, which needs no second cache and comes nearer to the true queries. A draft goes on behind the
end of a turn, where the released code stops. Read block by block, a draft is made behind each
block. LAQ++, whose last context queries vote beside the drafted ones, is not here. The paper's
context ends with the question, so that drafts answer it. So does the preset `laq`, which needs its
question before it reads. Where questions come later, a draft is whatever the model expects. Behind
a finished exchange, where no model was trained to go on, that is nothing: the bundled model says
the end of the turn over and over, and what is kept so is no better than chance. The preset
`laq_guidance` drafts an answer to a general request, which helps as far as the model can answer it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import Observation, Prompts, ScratchPrompt
from larder.core.types import Packed, TokenIds
from larder.ops.pooling import running_max
from larder.policy.attention_reduction import ObservationWindow
from larder.policy.scorers.base import AttentionScorer


@dataclass(frozen=True)
class Lookahead(AttentionScorer):
    """Attention from drafted queries, summed, then smoothed over `kernel` positions.

    Args:
        tokens: how many are drafted.
        kernel: width of the max pooling, in entries. Odd; 1 pools nothing.
        prompt: the name of a request that the draft answers, such as `question` or `guidance`;
            nothing is asked by default, which suits contexts that break off before an answer.
    """

    tokens: int = 8
    kernel: int = 7
    prompt: str = ""
    needs = frozenset({"drafts"})

    def __post_init__(self) -> None:
        require(self.tokens >= 1, "lookahead.tokens", "at least 1", self.tokens)
        require(self.kernel >= 1 and self.kernel % 2 == 1, "lookahead.kernel", "odd", self.kernel)

    def required_prompts(self) -> frozenset[str]:
        return frozenset({self.prompt} - {""})

    def scratch(self, block: TokenIds, start: int, prompts: Prompts) -> tuple[ScratchPrompt, ...]:
        request = tuple(prompts[self.prompt]) if self.prompt else ()
        return (ScratchPrompt(request, (0, start + len(block)), drafts=self.tokens),)

    def default_reduction(self) -> tuple[str, str]:
        return "sum", "group_sum"

    def observation_window(self, observation: Observation) -> ObservationWindow:
        return ObservationWindow(observation.queries[:, -self.tokens :], observation.entries)

    def finish(self, observation: Observation, heads: list[Float[Tensor, " _"]]) -> Packed:
        return torch.cat([running_max(head, self.kernel) for head in heads])


Part = Lookahead
