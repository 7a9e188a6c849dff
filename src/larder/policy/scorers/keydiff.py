"""Scorer by dissimilarity of a key to the average key; no attention needed.

Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments" (2025), arXiv:2504.15364, section 3. `variant="code"` follows
EpiCache's released adaptation, where one anchor is averaged over all heads of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from larder.core.observation import Observation
from larder.core.types import Packed, Variant
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class KeyDiff(Scorer):
    """Minus the cosine to the mean of the unit keys.

    Args:
        variant: `larder` and `paper` take one anchor per head, `code` one per layer.
    """

    variant: Variant = Variant.LARDER

    def score(self, observation: Observation) -> Packed:
        units = [
            F.normalize(observation.entries.head_keys(head).float(), dim=-1)
            for head in range(observation.layer.kv_heads)
        ]
        anchors = [unit.mean(0) for unit in units]
        if self.variant is Variant.CODE:
            anchors = [torch.cat(units).mean(0)] * len(units)
        pairs = zip(units, anchors, strict=True)
        return torch.cat([-(unit @ F.normalize(anchor, dim=0)) for unit, anchor in pairs])


Part = KeyDiff
