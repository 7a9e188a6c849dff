"""Fold what is rejected into the best entry of the run of similar keys that it stands in.

Wang, Jin, Yu and Zhang, "Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on
Long-Context Tasks" (2024), arXiv:2407.08454, section 4. Neighbors whose cached (rotated) keys have
a cosine of at least a threshold form a merge set; its pivot p is the entry that got most attention;
entry i weighs g_i = exp(-|k_p - k_i|^2 / (2 sigma^2)) and the pivot 1, all over their sum, keys and
values alike. We found no released code, and know the formulas at second hand.

Differences. In the paper every set becomes one entry, so that the threshold decides how many stay.
Here scorer and budget do: of a set all stay that they keep, the pivot is the kept one of the
highest score, and what is rejected of the set is folded into it. A set of which nothing is kept is
gone. Neighbors are those that the cache still holds, whatever stood between them. The paper takes
sigma from the distances within a set; which statistic we could not verify, and take `width` times
the mean distance of what is folded from its pivot. Entries do not count what they stand for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize

from larder.core.errors import BadParameter
from larder.core.observation import Entries, Scored
from larder.core.plan import Plan
from larder.core.types import Packed
from larder.policy.compensation._rejected import (
    Indices,
    distinct,
    first_best,
    heads_of,
    means,
    rejected,
    rows_at,
)
from larder.policy.compensation.base import Compensation

ROWS = 1 << 14  # keys widened to float32 at once: 8 MiB of keys of size 128


@dataclass(frozen=True)
class Kvmerger(Compensation):
    """KVMerger's merging in runs of similar keys.

    Args:
        threshold: the cosine of neighbors in one set, in [-1, 1].
        width: of the Gaussian kernel, in mean distances.
    """

    threshold: float = 0.75
    width: float = 1.0

    def __post_init__(self) -> None:
        if not -1 <= self.threshold <= 1:
            raise BadParameter(f"kvmerger.threshold must be in [-1, 1], got {self.threshold}.")
        if not 0 < self.width < math.inf:
            raise BadParameter(f"kvmerger.width must be above 0, got {self.width}.")

    def settle(self, plan: Plan, entries: Entries, scored: Scored) -> Plan:
        gone = rejected(plan, entries)
        if not len(gone):
            return plan
        sets = (~self._joined(entries)).long().cumsum(0) - 1
        pivots = first_best(scored.scores, sets, plan.kept, int(sets[-1]) + 1)[sets[gone]]
        sources, targets = gone[pivots >= 0], pivots[pivots >= 0]
        return replace(plan, folds=means(self._kernel(entries, sources, targets), sources, targets))

    def _joined(self, entries: Entries) -> Bool[Tensor, " T"]:
        """Which packed entries belong to the set of the one before."""
        every = torch.arange(sum(entries.lengths), device=entries.positions.device)
        rows, heads = rows_at(every, entries), heads_of(every, entries)
        alike = rows.new_zeros(len(rows), dtype=torch.float32)
        for first in range(1, len(rows), ROWS):
            keys = normalize(entries.keys[rows[first - 1 : first + ROWS]].float(), dim=-1)
            alike[first : first + ROWS] = (keys[1:] * keys[:-1]).sum(-1)
        joined = alike >= self.threshold
        joined[1:] &= heads[1:] == heads[:-1]
        joined[:1] = False
        return joined

    def _kernel(self, entries: Entries, sources: Indices, targets: Indices) -> Packed:
        """What each packed entry weighs: 1 for a pivot, less for what is folded into it."""
        apart = _distances(entries, sources, targets)
        own, places = distinct(targets)
        counts = torch.bincount(places, minlength=len(own))
        near = apart.new_zeros(len(own)).index_add(0, places, apart) / counts
        sigma = (self.width * near)[places]
        scaled = torch.where(apart > 0, apart / sigma, 0.0)  # equal keys weigh the same
        weights = apart.new_ones(sum(entries.lengths))
        return weights.index_copy(0, sources, (-scaled.square() / 2).exp())


def _distances(entries: Entries, sources: Indices, targets: Indices) -> Float[Tensor, " _"]:
    """How far the keys of each pair lie apart."""
    here, there = rows_at(sources, entries), rows_at(targets, entries)
    apart = torch.zeros(len(sources), device=sources.device)
    for first in range(0, len(sources), ROWS):
        some = slice(first, first + ROWS)
        between = entries.keys[here[some]].float() - entries.keys[there[some]].float()
        apart[some] = between.square().sum(-1).sqrt()
    return apart


Part = Kvmerger
