"""Uniform budget of which a share is drawn at random, by score (NaCL).

Chen et al., "NACL: A General and Effective KV Cache Eviction Framework for LLMs at Inference Time"
(2024), arXiv:2408.03675: beside the entries of the highest proxy score, every head keeps others
that are drawn without replacement with the probabilities softmax(score), so that an entry which the
proxies overlook has a chance. The paper draws 7 of the 20 percent of a text that it keeps.

Draws are made by adding Gumbel noise and taking the highest, which is the same distribution. They
repeat: the noise follows from seed, layer and head. How the paper seeds is not known to us.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import LayerScores, ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas, Plan
from larder.policy.budgets._selection import top_k_per_head
from larder.policy.budgets.base import Budget


@dataclass(frozen=True)
class Drawn(Budget):
    """Best entries of each head, and some of the others by chance.

    Args:
        share: part of the budget that is drawn, rounded down, in [0, 1]; 0 is `uniform`.
        seed: seed of the draw.
    """

    share: float = 0.35
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.share <= 1, "drawn.share", "in [0, 1]", self.share)

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        return {index: self._of_layer(index, each, quotas[index]) for index, each in ready.items()}

    def _of_layer(self, index: int, scored: LayerScores, tokens: int) -> Plan:
        sure = torch.zeros_like(scored.protected)
        sure[top_k_per_head(scored, tokens - int(self.share * tokens)).kept] = True
        heads = enumerate(scored.lengths)
        noise = [gumbel_noise(self._generator(index, head), length) for head, length in heads]
        noisy = scored.scores + torch.cat(noise).to(scored.scores.device)
        chances = replace(scored, scores=noisy, protected=scored.protected | sure)
        return top_k_per_head(chances, tokens)

    def _generator(self, index: int, head: int) -> torch.Generator:
        seed = (self.seed * 1_000_003 + index) * 1_009 + head
        return torch.Generator().manual_seed(seed % (1 << 63))


def gumbel_noise(source: torch.Generator, count: int) -> Float[Tensor, " N"]:
    """Numbers whose highest, added to logits, is a draw from the softmax of the logits."""
    uniform = torch.rand(count, generator=source).clamp_min(torch.finfo(torch.float32).tiny)
    return -(-uniform.log()).log()


Part = Drawn
