"""Merging of runs of similar keys into one entry (KVMerger).

Wang, Jin, Yu and Zhang, "Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on
Long-Context Tasks" (2024), arXiv:2407.08454, section 4. Neighbors whose cached (rotated) keys have
a cosine of at least a threshold form a merge set, which becomes one entry at the position of its
pivot p, the one that got most attention (take `column_mass`). Entry i weighs
g_i = exp(-|k_p - k_i|^2 / (2 sigma^2)) and the pivot 1, all over their sum, keys and values alike,
with sigma the sum of the distances of a set from its pivot, over sqrt(2) times its size. We found
no released code, and know the formulas at second hand.

The threshold decides how many entries stay. A budget bounds them: in a head whose sets are more
than its share of the budget, the threshold is lowered until they are not. Where the threshold
leaves fewer, fewer stay. What is protected stays as it is, and ends a set; if a head has no more
room than for that, the sets whose pivots score lowest are forgotten. Neighbors are those that the
cache still holds, whatever stood between them. Entries do not count what they stand for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize

from larder.core.arguments import require
from larder.core.observation import Entries, LayerScores
from larder.core.plan import Plan
from larder.core.types import Packed
from larder.policy.compensation._token_merge import (
    Indices,
    argmax_per_group,
    heads_of,
    mean_folds,
    rejected_indices,
    rejected_rows,
    unique_targets,
)
from larder.policy.compensation.base import Compensation

ROWS = 1 << 14  # keys widened to float32 at once: 8 MiB of keys of size 128


@dataclass(frozen=True)
class Kvmerger(Compensation):
    """KVMerger's merging in runs of similar keys.

    Args:
        threshold: the cosine from which on neighbors are in one set, in [-1, 1].
        width: of the Gaussian kernel, in units of the paper's sigma.
    """

    threshold: float = 0.75
    width: float = 1.0

    def __post_init__(self) -> None:
        require(-1 <= self.threshold <= 1, "kvmerger.threshold", "in [-1, 1]", self.threshold)
        require(0 < self.width < math.inf, "kvmerger.width", "above 0", self.width)

    def compensate(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        """A plan of its own, with no more entries of any head than the one given."""
        if not len(rejected_indices(plan, entries)):
            return plan
        opens = self._opens(entries, scored, plan.lengths)
        sets = opens.long().cumsum(0) - 1
        every = torch.arange(len(sets), device=sets.device)
        pivots = argmax_per_group(scored.ranked(), sets, every, int(opens.sum()))
        stays = _fitting(pivots, scored, heads_of(pivots, entries), plan.lengths)
        sources = every[stays[sets] & (pivots[sets] != every)]
        targets = pivots[sets[sources]]
        folds = mean_folds(self._kernel(entries, sources, targets), sources, targets)
        kept = pivots[stays]
        counts = torch.bincount(heads_of(kept, entries), minlength=len(plan.lengths))
        return replace(plan, kept=kept, lengths=tuple(int(count) for count in counts), folds=folds)

    def _opens(
        self, entries: Entries, scored: LayerScores, most: tuple[int, ...]
    ) -> Bool[Tensor, " T"]:
        """Mask of the packed entries that begin a merge set, at most `most` per head where
        possible.
        """
        alike, lengths = self._likeness(entries), list(entries.lengths)
        shields = scored.protected
        alike = alike.masked_fill(shields, -torch.inf)
        alike[1:] = alike[1:].masked_fill(shields[:-1], -torch.inf)
        opens = alike < self.threshold
        for head, own, count in zip(
            torch.split(alike, lengths), torch.split(opens, lengths), most, strict=True
        ):
            if int(own.sum()) > count:
                least = int(head.isneginf().sum())
                order = torch.argsort(head, stable=True)
                own[order[max(count, least) :]] = False
        return opens

    def _likeness(self, entries: Entries) -> Float[Tensor, " T"]:
        """The cosine of each packed entry's key with the one before; -inf for a head's first."""
        every = torch.arange(sum(entries.lengths), device=entries.positions.device)
        rows, heads = rejected_rows(every, entries), heads_of(every, entries)
        alike = rows.new_full((len(rows),), -torch.inf, dtype=torch.float32)
        for first in range(1, len(rows), ROWS):
            keys = normalize(entries.keys[rows[first - 1 : first + ROWS]].float(), dim=-1)
            alike[first : first + ROWS] = (keys[1:] * keys[:-1]).sum(-1)
        alike[1:].masked_fill_(heads[1:] != heads[:-1], -torch.inf)
        return alike

    def _kernel(self, entries: Entries, sources: Indices, targets: Indices) -> Packed:
        """Weight of each packed entry: 1 for a pivot, less for entries merged into it."""
        apart = _distances(entries, sources, targets)
        unique, indices = unique_targets(targets)
        counts = torch.bincount(indices, minlength=len(unique))
        sums = apart.new_zeros(len(unique)).index_add(0, indices, apart)
        sigma = (self.width * sums / (math.sqrt(2) * (counts + 1)))[indices]
        scaled = torch.where(apart > 0, apart / sigma, 0.0)  # equal keys weigh the same
        weights = apart.new_ones(sum(entries.lengths))
        return weights.index_copy(0, sources, (-scaled.square() / 2).exp())


def _fitting(
    pivots: Indices, scored: LayerScores, heads: Indices, most: tuple[int, ...]
) -> Bool[Tensor, " N"]:
    """Mask of the merge sets that stay: those of the best pivots, at most `most` per head."""
    ranked = scored.ranked()[pivots]
    order = torch.argsort(ranked, descending=True, stable=True)
    order = order[torch.argsort(heads[order], stable=True)]
    counts = torch.bincount(heads, minlength=len(most))
    firsts = (counts.cumsum(0) - counts)[heads[order]]
    indices = torch.arange(len(order), device=order.device) - firsts
    stays = torch.zeros_like(ranked, dtype=torch.bool)
    stays[order] = indices < torch.tensor(most, device=order.device)[heads[order]]
    return stays


def _distances(entries: Entries, sources: Indices, targets: Indices) -> Float[Tensor, " _"]:
    """Distances between the keys of each pair."""
    source_rows, target_rows = rejected_rows(sources, entries), rejected_rows(targets, entries)
    apart = torch.zeros(len(sources), device=sources.device)
    for first in range(0, len(sources), ROWS):
        some = slice(first, first + ROWS)
        between = entries.keys[source_rows[some]].float() - entries.keys[target_rows[some]].float()
        apart[some] = between.square().sum(-1).sqrt()
    return apart


Part = Kvmerger
