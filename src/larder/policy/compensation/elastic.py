"""Merging of rejected entries into the kept entry nearest by position (Elastic Cache).

Liu et al., "Efficient Inference of Vision Instruction-Following Models with Elastic Cache" (2024),
arXiv:2407.18121, importance-driven cache merging: what is kept are anchors, what is not joins the
anchor nearest by position, of two as near the earlier one, and an anchor becomes the mean of itself
and all that joined it, keys and values alike. We have read its abstract and its released code, not
its equations.

`larder` merges whenever something is rejected. So that an anchor that already stands for several
tokens keeps their share, it weighs as many tokens as it stands for, in the mean and, by ln n, in
attention; the latter can only be too little, never too much, since a mean of keys is met by no more
than the mean of what the keys are met by (Jensen). `paper` merges while a context is read, once,
by a plain mean, and forgets what is rejected while text is generated; the paper's rule for that
is `fixed_slot`. `code` does so as well, and spares what is protected (there: the first tokens and
the last one) from being an anchor. Two slips of the released code are not followed: it counts the
rejected without the first tokens, and so merges the wrong ones, and it takes the order of scores
for their ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from larder.core.observation import Entries, LayerScores, Phase
from larder.core.part import LOG_COUNT, Ledger
from larder.core.plan import Plan
from larder.core.types import PackedMask, Variant
from larder.policy.compensation._token_merge import (
    Indices,
    heads_of,
    kept_mask,
    mean_folds,
    merge_by_count,
    rejected_indices,
)
from larder.policy.compensation.base import Compensation

FAR = 1 << 40  # more than any two positions lie apart


@dataclass(frozen=True)
class Elastic(Compensation):
    """Elastic Cache's merging into anchors.

    Args:
        variant: by counts, or by plain means and while reading only, with or without the protected.
    """

    variant: Variant = Variant.LARDER
    ledger = Ledger(columns=(LOG_COUNT,))

    def compensate(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        if self.variant is not Variant.LARDER and scored.phase is Phase.DECODE:
            return plan
        anchors = kept_mask(plan, entries)
        if self.variant is Variant.CODE:
            anchors = anchors & ~scored.protected
        sources, targets = _nearest(rejected_indices(plan, entries), anchors, entries)
        if self.variant is Variant.LARDER:
            return merge_by_count(plan, entries, sources, targets)
        alike = torch.ones(len(anchors), device=sources.device)
        return replace(plan, folds=mean_folds(alike, sources, targets))


def _nearest(rejected: Indices, anchors: PackedMask, entries: Entries) -> tuple[Indices, Indices]:
    """Rejected entries whose head has an anchor, and the nearest anchor of each."""
    kept = torch.nonzero(anchors).flatten()
    if not len(kept) or not len(rejected):
        return rejected[:0], rejected[:0]
    every = torch.arange(len(anchors), device=rejected.device)
    positions = entries.packed_positions().long() + 2 * FAR * heads_of(every, entries)
    after = torch.searchsorted(positions[kept], positions[rejected])
    around = torch.stack([after - 1, after]).clamp(0, len(kept) - 1)  # [2, F]
    apart = (positions[kept[around]] - positions[rejected]).abs()
    best = kept[around.gather(0, apart.argmin(0)[None])[0]]
    near = apart.amin(0) < FAR
    return rejected[near], best[near]


Part = Elastic
