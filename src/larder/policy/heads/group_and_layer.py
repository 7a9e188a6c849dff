"""Mean over the group plus mean over the layer (KVCompose).

Akulov et al., "KVCompose: Efficient Structured KV Cache Compression with Composite Tokens" (2025),
arXiv:2509.05165, and its code in NVIDIA's kvpress: the mean over the query heads of a kv head, plus
the mean of these over all kv heads of the layer, which steadies the ranks of a single head. Where
heads hold different entries, they are matched by true position, and the second mean is over the
heads that still hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Entries, Observation
from larder.policy.heads.base import HeadRule, mean_by_position, positions_of


@dataclass(frozen=True)
class GroupAndLayer(HeadRule):
    """Mean of the group, plus mean over the layer."""

    def join(
        self, statistics: Sequence[Float[Tensor, "R _"]], entries: Entries, observation: Observation
    ) -> list[Float[Tensor, " _"]]:
        own, positions = [head.mean(0) for head in statistics], positions_of(entries)
        means = mean_by_position(list(zip(own, positions, strict=True)), positions)
        return [
            head + means[own_positions] for head, own_positions in zip(own, positions, strict=True)
        ]


Part = GroupAndLayer
