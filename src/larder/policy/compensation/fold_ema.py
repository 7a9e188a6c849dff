"""Fold what is rejected into the kept entry most like it, where it is like enough.

Wan et al., "D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large
Language Models" (2024), arXiv:2406.13035, section 4.2.2, eq. 9 to 12. Likeness u is the cosine of
cached (rotated) keys within a kv head. An entry whose best u is below a threshold is dropped; the
threshold is the mean of the best u of all that was rejected, and follows later means as an
exponential moving average: tau = beta * mean + (1 - beta) * tau. A kept entry becomes the mean of
itself and what is folded into it, weighed by exp(u), with u = 1 for itself; keys and values alike.

`larder` and `paper` agree: a threshold per layer and kv head, per rejected entry. `code` averages
likeness over the heads of a layer, by the rank that entries have among the rejected, and folds a
rank in all heads or in none; weights are u, and 1 for itself, over one plus the number folded, so
that keys and values shrink. Its threshold is the paper's here, and starts anew with every cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.ledger import Ledger
from larder.core.observation import Entries, Scored
from larder.core.plan import Folds, Plan
from larder.core.types import Variant
from larder.ops.folding import alike_folds, followed_means, means_of, moved_towards, weighed
from larder.ops.marking import places_unmarked
from larder.ops.nearest import nearest_rows
from larder.policy.compensation._rejected import heads_of, marked
from larder.policy.compensation.base import Compensation

TAU = "tau"
TIE = 1e-5  # so that rounding does not decide between equal likenesses


class Likeness(Enum):
    """Which vectors are compared; the paper's choice is keys."""

    KEYS = "keys"
    VALUES = "values"


class Threshold(Enum):
    """Whether what is not like enough is dropped; the paper's ablation folds everything."""

    EMA = "ema"
    NONE = "none"


class Weights(Enum):
    """How much of itself a kept entry keeps: the paper's way, or the same for all."""

    EXPONENTIAL = "exponential"
    AVERAGE = "average"


@dataclass(frozen=True)
class FoldEma(Compensation):
    """D2O's dynamic merging.

    Args:
        beta: how fast the threshold follows, in (0, 1].
        threshold: `ema`, or `none` to fold everything.
        likeness: whether `keys` or `values` are compared.
        weights: `exponential` in the likeness, or the plain `average`.
        variant: `larder` and `paper`, or `code`.
    """

    beta: float = 0.7
    threshold: Threshold = Threshold.EMA
    likeness: Likeness = Likeness.KEYS
    weights: Weights = Weights.EXPONENTIAL
    variant: Variant = Variant.LARDER
    ledger = Ledger(scalars=(TAU,))

    def __post_init__(self) -> None:
        if not 0 < self.beta <= 1:
            raise BadParameter(f"fold_ema.beta must be in (0, 1], got {self.beta}.")

    def settle(self, plan: Plan, entries: Entries, scored: Scored) -> Plan:
        del scored
        stays = marked(plan, entries)
        gone = places_unmarked(stays)
        if not len(gone):
            return plan
        rows = entries.keys if self.likeness is Likeness.KEYS else entries.values
        heads, before = heads_of(gone, entries), entries.scalars[TAU]
        likeness, nearest = nearest_rows(rows, *entries.layout, stays, gone)
        if self._is_published:
            found, given = (gone, nearest, heads, likeness), likeness.exp()
            tau, folds = alike_folds(*found, given, math.e, before, self.beta, TIE)
            scalars = {**plan.scalars, TAU: tau}
            return replace(plan, folds=Folds(*folds, folds[2]), scalars=scalars)
        compared = nearest >= 0
        if not bool(compared.all()):  # a head that keeps nothing has nothing to compare with
            parts = gone, likeness, nearest, heads
            gone, likeness, nearest, heads = (part[compared] for part in parts)
        if not len(gone):
            return plan
        if self.variant is Variant.CODE:
            judged, mean = _by_rank(likeness, heads, len(entries.lengths))
            tau = moved_towards(before, mean.expand(len(entries.lengths)), self.beta)
        else:
            judged, tau = likeness, followed_means(likeness, heads, before, self.beta)
        if self.threshold is Threshold.EMA:
            alike = judged >= tau[heads] - TIE
            if not bool(alike.all()):
                gone, nearest, likeness = gone[alike], nearest[alike], likeness[alike]
        folds = self._folds(gone, nearest, likeness)
        return replace(plan, folds=folds, scalars={**plan.scalars, TAU: tau})

    @property
    def _is_published(self) -> bool:
        """Whether threshold and weights are the paper's, which are found in one go."""
        paper = Threshold.EMA, Weights.EXPONENTIAL
        return self.variant is not Variant.CODE and (self.threshold, self.weights) == paper

    def _folds(
        self,
        sources: Int64[Tensor, " F"],
        targets: Int64[Tensor, " F"],
        likeness: Float[Tensor, " F"],
    ) -> Folds:
        """Weighted means over each target and what is folded into it."""
        if not len(sources):
            return Folds.none(sources.device)
        if self.weights is Weights.AVERAGE:
            given, kept = torch.ones_like(likeness), 1.0
        elif self.variant is Variant.CODE:
            given, kept = likeness, 1.0
        else:
            given, kept = likeness.exp(), math.e
        counted = torch.ones_like(given) if self.variant is Variant.CODE else given
        sources, targets, weights = weighed(sources, targets, given, counted, kept)
        return Folds(sources, targets, weights, weights)


def _by_rank(likeness: Tensor, heads: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """For each rejected entry the mean over all heads' entries of its rank; the mean of all."""
    firsts = torch.searchsorted(heads, torch.arange(kv_heads, device=heads.device))
    ranks = torch.arange(len(heads), device=heads.device) - firsts[heads]
    by_rank = means_of(likeness, ranks, int(ranks.max()) + 1)
    return by_rank[ranks], likeness.mean()


Part = FoldEma
