"""What an entry can move the output by at most: its weight times the size of its value.

Feng et al., "CriticalKV: Optimizing KV Cache Eviction from an Output Perturbation Perspective"
(2025), arXiv:2502.03805: (weight + epsilon) times the L1 norm of the value behind the output
projection; the authors' epsilon is 1e-4. Differences: the projection is not seen where scores are
made, so the norm is the value's own; and the paper gives half of the budget to the highest weights
before it looks at values, which no score can say. Weights are scores as they come: with `mean` or
`max` they are on the scale that the epsilon is meant for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from larder.core.errors import BadParameter
from larder.core.observation import Seen
from larder.core.types import Packed
from larder.policy.values._weights import as_weights, infinities_of
from larder.policy.values.base import ValueRule


@dataclass(frozen=True)
class Criticality(ValueRule):
    """Weights times L1 norms. Of scores that can be negative the lowest is taken off first.

    Args:
        epsilon: added to every weight, so that large values count where nobody looked.
    """

    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < math.inf:
            raise BadParameter(
                f"criticality.epsilon must be a number, 0 or more, got {self.epsilon}."
            )

    def weigh(self, scores: Packed, seen: Seen) -> Packed:
        entries = seen.entries
        norms = torch.cat(
            [
                entries.head_values(head).float().abs().sum(-1)
                for head in range(len(entries.lengths))
            ]
        )
        return infinities_of(scores, (as_weights(scores) + self.epsilon) * norms)


Part = Criticality
