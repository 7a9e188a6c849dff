"""Mean over queries.

The usual choice of scorers with an observation window, according to Feng et al., "Taming the
Fragility of KV Cache Eviction in LLM Inference" (2025), arXiv:2510.13334. The mean is over all
queries, those that cannot see an entry included, as code after SnapKV (arXiv:2404.14469) does:
within a layer it ranks as `sum`, but is on the same scale however many queries there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from larder.policy.aggregation.sum import Sum


@dataclass(frozen=True)
class Mean(Sum):
    """Mean over queries; one that cannot see an entry counts as 0."""

    def finish(self, state: tuple[Tensor, ...], total: int) -> Float[Tensor, "R S"]:
        return state[0] / max(total, 1)


Part = Mean
