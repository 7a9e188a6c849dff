"""Maximum over queries: a single high weight keeps an entry.

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (2025),
arXiv:2505.23416, section 3; EpiCache (arXiv:2509.17396, eq. 3) takes it for all scorers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from larder.core.types import WeightChunk
from larder.policy.aggregation.base import Aggregation


@dataclass(frozen=True)
class Max(Aggregation):
    """Maximum over queries."""

    def fold(self, state: tuple[Tensor, ...], weights: WeightChunk, first: int, total: int) -> None:
        torch.maximum(state[0], weights.amax(1), out=state[0])


Part = Max
