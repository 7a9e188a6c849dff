"""Scorer by novelty and by attention from a prompt, each with a share of the budget (InfiniPot).

Kim et al., "InfiniPot: Infinite Context Processing on Memory-Constrained LLMs" (2024),
arXiv:2410.01518, section 3.3. Novelty under compression (NuC): -log p of a token, given what was
still held when it was read, the same for all heads. Catalyst prompt (CaP): the sum of weights that
the tokens of a general request, read behind the cache, give an entry, head by head. A share of the
room, half in the paper, goes to the most novel entries, and the rest to those with the most
attention.

The paper's text was not available: both signals and their shares follow secondary summaries.

A scorer does not know how much room there is, so both lists are merged into one: however it is cut,
the first of each list are in, in their shares. Where both name the same entry, the place left over
goes to both lists in their shares, and in the paper to attention. Weights are shared among cached
entries only, as in `patched`. The paper uses cache positions, which the storage `compact` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.attention_reduction import ObservationWindow
from larder.policy.scorers.base import AttentionScorer, PromptScorer


@dataclass(frozen=True)
class InfiniPot(PromptScorer, AttentionScorer):
    """Maximum over both rankings of the share of the ranking divided by the rank in it.

    Args:
        novel: the share of the room for the most novel entries, in [0, 1].
        prompt: the name of the request.
    """

    novel: float = 0.5
    prompt: str = "summarize"
    needs = frozenset({"surprise"})

    def __post_init__(self) -> None:
        require(0 <= self.novel <= 1, "infinipot.novel", "a fraction in [0, 1]", self.novel)

    def default_reduction(self) -> tuple[str, str]:
        return "sum", "group_sum"

    def observation_window(self, observation: Observation) -> ObservationWindow:
        return ObservationWindow(observation.queries, observation.entries)

    def finish(self, observation: Observation, heads: list[Float[Tensor, " _"]]) -> Packed:
        novelty = torch.split(
            observation.entries.column("surprise"), list(observation.entries.lengths)
        )
        pairs = zip(novelty, heads, strict=True)
        return torch.cat([self._merged(_ranks(new), _ranks(head)) for new, head in pairs])

    def _merged(
        self, new: Float[Tensor, " S"], attended: Float[Tensor, " S"]
    ) -> Float[Tensor, " S"]:
        return torch.maximum(self.novel / new, (1 - self.novel) / attended)


def _ranks(scores: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
    """Ranks from 1 on, the highest score first; ties go to the earlier entry."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return 1.0 + order.argsort().to(torch.float32)


Part = InfiniPot
