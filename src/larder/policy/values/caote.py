"""Value rule by the change of a head's output when an entry is evicted (CAOTE).

Goel et al., "CAOTE: KV Cache Selection for LLMs via Attention Output Error-Based Token Eviction"
(2025), arXiv:2504.14051, section 3: with weights a that sum to 1 and output o, dropping entry i and
sharing its weight out moves the output by a_i / (1 - a_i) * |v_i - o|. As there, scores of another
method stand for attention: divided by their sum, here over each kv head. Entries whose scores are
infinite keep them and have no part in o. An entry that holds more than half of the weight is taken
out for real, because 1 - a loses its digits near 0; one that holds all of it moves o to 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.values.base import (
    NO_SELECTION,
    Selection,
    ValueRule,
    non_negative_weights,
    restore_infinities,
)


@dataclass(frozen=True)
class Caote(ValueRule):
    """Error of the attention output; the lowest score is subtracted where scores are negative."""

    def weigh(
        self, scores: Packed, observation: Observation, selection: Selection = NO_SELECTION
    ) -> Packed:
        weights = torch.split(non_negative_weights(scores), list(observation.entries.lengths))
        moves = [
            _output_changes(head, observation.entries.head_values(index).float())
            for index, head in enumerate(weights)
        ]
        return restore_infinities(scores, torch.cat(moves))


def _output_changes(
    weights: Float[Tensor, " S"], values: Float[Tensor, "S D"]
) -> Float[Tensor, " S"]:
    """Distance that the weighted mean of the values moves without each of them."""
    if not len(weights):
        return weights
    shares = _shares(weights)
    moves = shares / (1 - shares) * _norm(values - shares @ values)
    top = shares.argmax()
    others = _shares(weights.index_fill(0, top, 0.0))
    moves[top] = shares[top] * _norm(values[top] - others @ values)
    return moves


def _shares(weights: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
    """Divided by their sum; all 0 if that is 0."""
    return weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)


def _norm(vectors: Float[Tensor, "*some D"]) -> Float[Tensor, "*some"]:
    return vectors.square().sum(-1).sqrt()


Part = Caote
