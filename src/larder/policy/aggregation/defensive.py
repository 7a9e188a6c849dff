"""The worst case: the highest weight that any query gives, and no less than the average of that.

Feng et al., "Taming the Fragility of KV Cache Eviction in LLM Inference" (2025), arXiv:2510.13334,
DefensiveKV: the risk of losing an entry is its highest weight over the window, and where the window
happened not to look, the mean risk of all entries stands in. Entries below that floor are equal to
each other; the paper tells them apart by their values, so take `criticality` with it.

Differences from the released code: the floor is taken for every query head before heads are joined
(by `group_max`, as in the paper), there from the maximum over the group, which is the same where a
kv head has one query head; the mean is over all entries that are looked at, there without those of
the window itself; and rows are not smoothed over 5 neighbors first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.policy.aggregation.max import Max


@dataclass(frozen=True)
class Defensive(Max):
    """The best query counts, and nobody falls below the mean."""

    def finish(self, state: tuple[Tensor, ...], total: int) -> Float[Tensor, "R S"]:
        del total
        return torch.maximum(state[0], state[0].mean(-1, keepdim=True))


Part = Defensive
