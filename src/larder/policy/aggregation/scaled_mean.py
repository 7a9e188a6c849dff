"""Mean over queries of each weight times the number of keys that the query sees (FINCH).

Corallo and Papotti, "FINCH: Prompt-guided Key-Value Cache Compression for Large Language Models"
(2024), arXiv:2408.00167: a later query shares its weight among more keys, so its weights are
smaller; scaled by how many keys it sees, a query that tells no keys apart gives each of them 1
wherever it stands. Read off the code after the paper that its authors contributed to kvpress, which
counts the keys before the query, not the query's own; here it counts as well. A weight too small
for float32 is not counted as seen: its logit is 87 or more below the highest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.types import WeightChunk
from larder.policy.aggregation.mean import Mean


@dataclass(frozen=True)
class ScaledMean(Mean):
    """Mean over queries, each scaled by the number of keys that it sees."""

    depends_on_visible_count = True

    def fold(self, state: tuple[Tensor, ...], weights: WeightChunk, first: int, total: int) -> None:
        seen = (weights > 0).sum(-1, dtype=torch.float32)  # [R, c]
        state[0].add_(torch.einsum("rc,rcs->rs", seen, weights))

    def single_query(self, weights: Float[Tensor, "R S"]) -> Float[Tensor, "R S"]:
        return weights * (weights > 0).sum(-1, keepdim=True)


Part = ScaledMean
