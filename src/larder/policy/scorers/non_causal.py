"""Scorer by attention without a causal mask, chunk by chunk (Compactor).

Chari and Van Durme, "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate
Leverage Scores" (2025), arXiv:2507.08143: the text is cut into chunks, every query of a chunk
attends to all keys of it, earlier and later ones, and a key's weights are summed over queries and
averaged over the query heads of its kv head. They are multiplied by the length of the value and
averaged over three neighbors. Follows the code that the authors gave to NVIDIA/kvpress, products
without the model's scaling included (`scaling="model"` is with it); the keys that pad its last
chunk, which take part of the weights there, are left out here. Scores there are in standard
deviations from a layer's mean, which changes no order within a layer.

Chunks are cut by position, from `first` on. Entries of chunks that no query of the pass
belongs to score nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require, require_at_least
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.ops.attention import cap_logits
from larder.ops.pooling import running_mean
from larder.policy.scorers.base import Scorer

NEIGHBORS = 3  # entries that a score is averaged over


class Scaling(Enum):
    """Factor of products of queries and keys: 1, or the model's."""

    NONE = "none"
    MODEL = "model"


@dataclass(frozen=True)
class NonCausal(Scorer):
    """Attention of each chunk to itself, in both directions, times the length of the value.

    Args:
        chunk: positions of a chunk.
        scaling: `none`, as in the released code, or that of the `model`.
        first: position at which a chunk begins, such as that of the first token.
    """

    chunk: int = 256
    scaling: Scaling = Scaling.NONE
    first: int = 0

    def __post_init__(self) -> None:
        require(self.chunk >= 1, "non_causal.chunk", "at least 1 token", self.chunk)
        require_at_least(0, "non_causal", first=self.first)

    def observes_whole_text(self) -> bool:
        return True

    def score(self, observation: Observation) -> Packed:
        return torch.cat(
            [self._of_head(observation, head) for head in range(observation.layer.kv_heads)]
        )

    def _of_head(self, observation: Observation, head: int) -> Float[Tensor, " S"]:
        entries, group = observation.entries, observation.layer.group
        queries = observation.queries[head * group : (head + 1) * group].float()
        keys, positions = entries.head_keys(head).float(), entries.head_positions(head)
        chunks = (positions - self.first) // self.chunk
        own = (observation.query_positions - self.first) // self.chunk
        sums = keys.new_zeros(len(keys))
        for number in sorted(set(map(int, own))):
            members = chunks == number
            logits = queries[:, own == number] @ keys[members].T
            logits = logits * observation.layer.scaling if self.scaling is Scaling.MODEL else logits
            sums[members] = cap_logits(logits, observation.layer.softcap).softmax(-1).sum(1).mean(0)
        lengths = entries.head_values(head).float().square().sum(-1).sqrt()
        return running_mean(sums * lengths, NEIGHBORS)


Part = NonCausal
