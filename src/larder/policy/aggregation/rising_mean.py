"""Mean over queries in which later queries count more, along a straight line (PyramidInfer).

Yang et al., "PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference" (2024),
arXiv:2405.12532, section 3.2: the attention that a token gets from the recent ones is averaged,
with a greater weight for more recent queries. In the released code weights rise linearly from 1 for
the first query that counts to 1.2 for the last, and the sum is divided by the number of queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from larder.core.arguments import require
from larder.core.types import WeightChunk
from larder.policy.aggregation.mean import Mean


@dataclass(frozen=True)
class RisingMean(Mean):
    """Mean over queries, each scaled by a factor that rises from 1 to `last`.

    Args:
        last: factor of the last query, above 0; 1 is the plain mean. A single query counts 1.
    """

    last: float = 1.2

    def __post_init__(self) -> None:
        require(self.last > 0, "rising_mean.last", "above 0", self.last)

    def fold(self, state: tuple[Tensor, ...], weights: WeightChunk, first: int, total: int) -> None:
        positions = torch.arange(first, first + weights.shape[1], device=weights.device)
        factors = 1 + (self.last - 1) * positions / max(total - 1, 1)
        state[0].add_(torch.einsum("c,rcs->rs", factors.to(weights.dtype), weights))


Part = RisingMean
