"""Scorer by what an entry adds to the last hidden states while the context is repeated (KVgrad).

KVgrad (2026), https://openreview.net/forum?id=cg1wTCJjjk, as NVIDIA/kvpress 0.5.5 has it; no paper
was at hand. Like `reconstruct` (KVzip, Kim et al. 2025, arXiv:2505.23416, section 3) it has the
text repeated chunk by chunk. An entry's score is the highest product, over the tokens p of the copy
and the query heads of its group, of

    weight that p gives it  x  norm of its value behind the output projection
    x  norm of the gradient, by the attention output of p, of the squares of all last hidden states

so attention counts by what it writes, and by how much the outcome depends on the token that looks.

Gradients (provider `gradients`) take a pass of their own, a forward and a backward over the copy,
before the one that is scored: reading costs about four times as much. `variant` says what weights
are shared among, as in `reconstruct`; `code` is kvpress' rule. Over several chunks both agree in

- where chunks are cut: at `chunk` tokens, the last one shorter;
- what a copy is read behind: the whole context, at the positions behind it, without earlier copies;
- what a weight is shared among: the first `opening` tokens, the chunk's own entries, and the prompt
  itself up to the query; entries of other chunks take no share;
- the objective of each chunk, its own; the maximum over all tokens of the prompt, those of the
  request among them; and that scores of all chunks are compared as they are.

They differ in three things. kvpress words the request of a later chunk otherwise ("Repeat the part
of the previous context exactly, starting with") and puts the 8 tokens before the chunk in front of
the end of the user's turn, where they close the request; here the request is that of the first
chunk and these tokens open the copy. It counts chunks behind the opening of the chat template,
whose entries it does not score, here from the first token. It computes weights and scores in the
model's dtype, here in float32. Given the same requests, both keep the same entries of three chunks
of a text on SmolLM2 in float32. `larder`, the default, shares weights among the chunk's own entries
and cuts nearly equal chunks without such tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import Observation, Prompts, ScratchPrompt
from larder.core.part import LOG_COUNT
from larder.core.types import Packed, TokenIds, Variant
from larder.ops.attention import cap_logits, sink_logits, sinks_by_group
from larder.ops.attention_weights import softmax_with_sinks
from larder.policy.attention_reduction import ObservationWindow
from larder.policy.scorers.base import Scorer
from larder.policy.scorers.reconstruct import Reconstruct

GRADIENTS = "gradients"
ROWS = 1 << 10  # values that are projected at once
QUERIES = 1 << 7  # queries whose weights are held at once


@dataclass(frozen=True)
class KVGrad(Scorer):
    """KVgrad: attention of a copy, times what it writes, times what depends on it.

    Args:
        chunk: the most tokens repeated at a time.
        opening: tokens at the start that `paper` and `code` share every weight with.
        variant: as in `reconstruct`.
    """

    chunk: int = 512
    opening: int = 4
    variant: Variant = Variant.LARDER
    prompts = frozenset({"repeat"})
    needs = frozenset({GRADIENTS, "projection"})

    def __post_init__(self) -> None:
        require(self.chunk >= 1, "kvgrad.chunk", "at least 1 token", self.chunk)
        require(self.opening >= 0, "kvgrad.opening", "0 or more", self.opening)

    def scratch(self, block: TokenIds, start: int, prompts: Prompts) -> tuple[ScratchPrompt, ...]:
        return self._reconstruct.scratch(block, start, prompts)

    def score(self, observation: Observation) -> Packed:
        window = self._reconstruct.observation_window(observation)
        effects = [
            self._effects(observation, window, head) for head in range(observation.layer.kv_heads)
        ]
        best = torch.full_like(
            observation.entries.packed_positions(), -torch.inf, dtype=torch.float32
        )
        for one in range(observation.layer.group):
            weights = self._reconstruct.finish(observation, [head[one] for head in effects])
            norms = torch.cat(
                [_norms(observation, head, one) for head in range(observation.layer.kv_heads)]
            )
            product = torch.where(weights.isfinite(), weights * norms, weights)
            best = torch.maximum(best, product)
        return best

    @cached_property
    def _reconstruct(self) -> Reconstruct:
        return Reconstruct(self.chunk, self.opening, self.variant)

    def _effects(
        self, observation: Observation, window: ObservationWindow, head: int
    ) -> Float[Tensor, "R S"]:
        """Highest product of weight and gradient that any query gives each entry of the window."""
        keys, entries, layer = (
            window.entries.head_keys(head).float(),
            window.entries,
            observation.layer,
        )
        head_queries = window.queries[head * layer.group : (head + 1) * layer.group].float()
        sinks = sinks_by_group(sink_logits(layer, keys), layer.kv_heads)[head]
        bias = entries.columns.get(LOG_COUNT)
        best = keys.new_zeros(layer.group, len(keys))
        if not len(keys):
            return best
        for rows in torch.split(torch.arange(head_queries.shape[1], device=keys.device), QUERIES):
            logits = cap_logits(
                head_queries[:, rows] @ keys.T * layer.scaling, layer.softcap
            )  # [R, Q, S]
            if bias is not None:
                logits = logits + bias[entries.rows(head)]
            if window.positions is not None:
                later = entries.head_positions(head) > window.positions[rows, None]
                logits = logits.masked_fill(later, -torch.inf)
            weights = softmax_with_sinks(logits, sinks)
            slopes = observation.inputs[GRADIENTS][rows].float()
            best = torch.maximum(best, (weights * slopes[:, None]).amax(1))
        return best


def _norms(observation: Observation, head: int, one: int) -> Float[Tensor, " S"]:
    """L2 norms of a head's values, behind the projection of one of its query heads where known."""
    values = observation.entries.head_values(head)
    if "projection" not in observation.inputs:
        return values.float().square().sum(-1).sqrt()
    matrix = observation.inputs["projection"][
        head * observation.layer.group + one
    ].float()  # [D, N]
    parts = [part.float() @ matrix for part in torch.split(values, ROWS)]
    return torch.cat([part.square().sum(-1).sqrt() for part in parts])


Part = KVGrad
