"""Uniform budget that keeps whole units alone, skipping those that do not fit (ShotKV).

Liu et al., "Can LLMs Maintain Fundamental Abilities under KV Cache Compression?" (2025),
arXiv:2502.01941 (ShotKV): whole examples stay, the best first; one that does not fit into what is
left is skipped, and smaller ones behind it may fit. A unit is a run of neighboring entries of a
head with equal scores, as units make them, and protected entries come first. What no unit fits into
is not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from larder.core.observation import LayerScores, ScoredLayers
from larder.core.plan import LayerPlans, LayerQuotas, Plan
from larder.policy.budgets._selection import top_k_per_head
from larder.policy.budgets.base import Budget


@dataclass(frozen=True)
class Entire(Budget):
    """The same number of entries for every head at most, in whole units."""

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        return {index: _of_layer(scored, quotas[index]) for index, scored in ready.items()}


def _of_layer(scored: LayerScores, tokens: int) -> Plan:
    sure = torch.zeros_like(scored.protected)
    sure[top_k_per_head(scored, tokens).kept] = True
    lengths = list(scored.lengths)
    parts = zip(
        torch.split(scored.scores, lengths),
        torch.split(scored.protected, lengths),
        torch.split(sure & scored.protected, lengths),
        strict=True,
    )
    return Plan.from_mask(torch.cat([_of_head(*part, tokens) for part in parts]), scored.lengths)


def _of_head(
    scores: Tensor, protected: Bool[Tensor, " S"], sure: Bool[Tensor, " S"], tokens: int
) -> Bool[Tensor, " S"]:
    """Mask of what stays: protected entries as far as they fit, then whole units."""
    stays = sure.clone()
    if not len(scores):
        return stays
    begins = torch.ones_like(protected)
    begins[1:] = (scores[1:] != scores[:-1]) | protected[1:] | protected[:-1]
    labels = begins.long().cumsum(0) - 1
    sizes, firsts = torch.bincount(labels), torch.nonzero(begins).flatten()
    left = tokens - int(stays.sum())
    for unit in map(int, torch.argsort(scores[firsts], descending=True, stable=True)):
        size = int(sizes[unit])
        if not protected[firsts[unit]] and size <= left:
            stays[labels == unit] = True
            left -= size
    return stays


Part = Entire
