"""Scorer by the projection of keys on the main direction of queries (Q-Filters).

Godey et al., "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression" (2025),
arXiv:2503.02812. The queries of a head lie mostly on one side of the origin, along the first right
singular vector of a sample of them. Keys that point that way get high logits from whatever query
comes. One direction per kv head, the mean over its query heads, is measured once per model
(`q_filters` of `larder model calibrate`).

A measured direction points where queries are, and the score is the projection on it. The released
directions point the other way, and the score there is minus the projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class QFilters(Scorer):
    """Projection of a key on the mean direction of its queries."""

    calibrations = frozenset({"q_filters"})

    def score(self, observation: Observation) -> Packed:
        device, kv_heads = observation.entries.keys.device, observation.layer.kv_heads
        filters = torch.tensor(observation.calibration["q_filters"], device=device).view(
            kv_heads, -1
        )
        heads = (observation.entries.head_keys(h).float() @ filters[h] for h in range(kv_heads))
        return torch.cat([*heads])


Part = QFilters
