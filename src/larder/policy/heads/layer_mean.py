"""Mean over all heads of a layer, so that all kv heads keep the same entries (TOVA).

Oren et al., "Transformers are Multi-State RNNs" (2024), arXiv:2401.06104: TOVA averages over all
heads of a layer and drops the same token in each. Where heads hold different entries, which cannot
come of this rule with budgets per head (`uniform`), entries are matched by true position, and the
mean is over the heads that still hold it. Rules after this one that look at a head's values or
make units of its entries may tell heads apart again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Entries, Observation
from larder.ops.moments import layer_mean
from larder.policy.heads.base import HeadRule, mean_by_position, positions_of


@dataclass(frozen=True)
class LayerMean(HeadRule):
    """Mean over the query heads of the layer that hold a position."""

    def join(
        self, statistics: Sequence[Float[Tensor, "R _"]], entries: Entries, observation: Observation
    ) -> list[Float[Tensor, " _"]]:
        if _same_positions(entries):
            return [torch.cat(list(statistics)).mean(0)] * len(statistics)
        positions = positions_of(entries)
        own = [head.mean(0) for head in statistics]
        means = mean_by_position(list(zip(own, positions, strict=True)), positions)
        return [means[own_positions] for own_positions in positions]

    def join_stored(
        self, statistics: Float[Tensor, "R C"], entries: Entries, observation: Observation
    ) -> list[Float[Tensor, " _"]]:
        mean = layer_mean(statistics, entries.positions, *entries.layout)
        if mean is None:
            return super().join_stored(statistics, entries, observation)
        return [mean] * len(entries.lengths)


def _same_positions(entries: Entries) -> bool:
    """True if all heads hold the same positions, as they do under budgets per head."""
    if len(set(entries.lengths)) > 1:
        return False
    positions = entries.packed_positions().view(len(entries.lengths), -1)
    return bool((positions[1:] == positions[0]).all())


Part = LayerMean
