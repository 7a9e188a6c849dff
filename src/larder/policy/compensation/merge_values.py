"""Merging of the values of rejected entries into the most similar kept entry.

The `MergingPress` of NVIDIA/kvpress, which names as its origins Bolya et al., "Token Merging: Your
ViT But Faster" (2023), arXiv:2210.09461, and D2O (2024), arXiv:2406.13035. The nearest kept entry
is the one with the highest cosine u of cached (rotated) keys in the head; from a threshold on, the
rejected value joins it with the weight u |v_e| / (|v_e| + |v_k|), the kept value with the weight 1,
over the sum of weights. Keys stay as they are.

Entries do not count what they stand for: a kept entry gets no more attention than before. D2O's
merging with a moving threshold, and with counts, is `fold_ema`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from larder.core.arguments import require
from larder.core.observation import Entries, LayerScores
from larder.core.plan import Plan
from larder.ops.packing import unmasked_indices
from larder.ops.search import nearest_rows
from larder.policy.compensation._token_merge import kept_mask, mean_folds
from larder.policy.compensation.base import Compensation


@dataclass(frozen=True)
class MergeValues(Compensation):
    """Values join the value of the entry with the most similar key.

    Args:
        threshold: the cosine from which on a value is merged, in [0, 1]; below it is dropped.
    """

    threshold: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.threshold <= 1, "merge_values.threshold", "in [0, 1]", self.threshold)

    @property
    def merges_apart(self) -> bool:
        return True

    def compensate(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        stays = kept_mask(plan, entries)
        rejected = unmasked_indices(stays)
        if not len(rejected):
            return plan
        likeness, nearest = nearest_rows(entries.keys, *entries.layout, stays, rejected)
        joins = (nearest >= 0) & (likeness >= self.threshold) & (likeness > 0)
        sources, targets, likeness = rejected[joins], nearest[joins], likeness[joins]
        if not len(sources):
            return plan
        weights = torch.ones(len(stays), device=rejected.device)
        lengths = entries.pack(entries.values).float().square().sum(-1).sqrt()
        both = (lengths[sources] + lengths[targets]).clamp_min(torch.finfo(torch.float32).tiny)
        weights[sources] = likeness * lengths[sources] / both
        folds = mean_folds(weights, sources, targets)
        is_self = folds.sources == folds.targets
        return replace(plan, folds=replace(folds, key_weights=is_self.float()))


Part = MergeValues
