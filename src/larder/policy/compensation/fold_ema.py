"""Merging of rejected entries into the most similar kept entry, above a moving threshold (D2O).

Wan et al., "D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large
Language Models" (2024), arXiv:2406.13035, section 4.2.2, eq. 9 to 12. Likeness u is the cosine of
cached (rotated) keys within a kv head. An entry whose best u is below a threshold is dropped; the
threshold is the mean of the best u of all that was rejected, and follows later means as an
exponential moving average: tau = beta * mean + (1 - beta) * tau.

`paper`: a kept entry becomes the mean of itself and what is merged into it, weighed by exp(u), with
u = 1 for itself; keys and values alike. That harms: the logit of a mean key is the mean of the
logits, which is less than what its entries draw together, and far less than what a heavy hitter
draws alone. On SmolLM2-135M (six chats of LoCoMo, 1,200 tokens, a quarter kept, equal layers) it is
.094 nats from the full cache where dropping is .058 from it.

`larder` leaves keys as they are. A value becomes the mean weighed by the attention that each entry
has received, per query that could see it (the tally `mass`), and the entry's logit rises by the
logarithm of what that attention adds up to, over its own. For a query that looks at entries as
earlier ones did on average, the merged entry gives what its entries gave together: .044 nats.

`code` averages likeness over the heads of a layer, by the rank that entries have among the
rejected, and merges a rank in all heads or in none; weights are u, and 1 for itself, over one plus
the number merged, so that keys and values shrink. Its threshold is the paper's here, and starts
again with every cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import Entries, LayerScores
from larder.core.part import LOG_COUNT, Ledger
from larder.core.plan import Folds, Plan, StepMerging
from larder.core.types import Variant
from larder.ops.entry_merge import (
    FoldRows,
    group_means,
    normalized_folds,
    thresholded_folds,
    update_ema,
    updated_means,
)
from larder.ops.packing import unmasked_indices
from larder.ops.search import nearest_rows
from larder.policy.compensation._token_merge import heads_of, kept_mask
from larder.policy.compensation.base import Compensation

TAU = "tau"
TIE = 1e-5  # so that rounding does not decide between equal likenesses


class Likeness(Enum):
    """Vectors that are compared; the paper's choice is keys."""

    KEYS = "keys"
    VALUES = "values"


class MergeThreshold(Enum):
    """Threshold below which entries are dropped; the paper's ablation merges everything."""

    EMA = "ema"
    NONE = "none"


class Weights(Enum):
    """Weights of merged entries.

    VARIANT: as the variant has it, `larder` by attention, `paper` exponentially, `code` by the
    likeness itself. ATTENTION: attention received per query. EXPONENTIAL: exp of the likeness.
    AVERAGE: all the same.
    """

    VARIANT = "variant"
    ATTENTION = "attention"
    EXPONENTIAL = "exponential"
    AVERAGE = "average"


WEIGHTS = {
    Variant.LARDER: Weights.ATTENTION,
    Variant.PAPER: Weights.EXPONENTIAL,
    Variant.CODE: None,
}


@dataclass(frozen=True)
class FoldEma(Compensation):
    """D2O's dynamic merging.

    Args:
        beta: how fast the threshold follows, in (0, 1].
        threshold: `ema`, or `none` to merge everything.
        likeness: whether `keys` or `values` are compared.
        weights: those of the `variant`, `attention`, `exponential` in the likeness, or the plain
            `average`.
        variant: `larder` (keys stay, and an entry counts for what was merged into it), `paper` or
            `code`.
    """

    beta: float = 0.7
    threshold: MergeThreshold = MergeThreshold.EMA
    likeness: Likeness = Likeness.KEYS
    weights: Weights = Weights.VARIANT
    variant: Variant = Variant.LARDER
    ledger = Ledger(scalars=(TAU,))

    def __post_init__(self) -> None:
        require(0 < self.beta <= 1, "fold_ema.beta", "in (0, 1]", self.beta)

    def required_ledger(self) -> Ledger:
        return replace(self.ledger, columns=(LOG_COUNT,)) if self._counts else self.ledger

    def required_tallies(self) -> frozenset[str]:
        return frozenset({"mass"}) if self._weighs is Weights.ATTENTION else frozenset()

    @property
    def merges_apart(self) -> bool:
        return self._counts

    @property
    def _counts(self) -> bool:
        """True if keys do not change and `LOG_COUNT` accounts for merged entries."""
        return self.variant is Variant.LARDER

    @property
    def _weighs(self) -> Weights | None:
        """Weighting of merged entries; None for the likeness itself."""
        return WEIGHTS[self.variant] if self.weights is Weights.VARIANT else self.weights

    @property
    def is_step_rule(self) -> bool:
        return (
            self._counts
            and self.threshold is MergeThreshold.EMA
            and self.likeness is Likeness.KEYS
            and self._weighs is Weights.ATTENTION
        )

    @property
    def step_merging(self) -> StepMerging | None:
        return StepMerging(TAU, self.beta, TIE)

    def compensate(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        stays = kept_mask(plan, entries)
        rejected = unmasked_indices(stays)
        if not len(rejected):
            return plan
        rows = entries.keys if self.likeness is Likeness.KEYS else entries.values
        likeness, nearest = nearest_rows(rows, *entries.layout, stays, rejected)
        heads = heads_of(rejected, entries)
        if self.threshold is MergeThreshold.EMA and self.variant is not Variant.CODE:
            weights, own = self._merge_weights(rejected, nearest, likeness, entries)
            tau, folds = thresholded_folds(
                rejected,
                nearest,
                heads,
                likeness,
                weights,
                own,
                entries.scalars[TAU],
                self.beta,
                TIE,
            )
            return self._merged(replace(plan, scalars={**plan.scalars, TAU: tau}), folds, entries)
        return self._merge_in_steps(plan, entries, rejected, nearest, heads, likeness)

    def _merge_in_steps(
        self,
        plan: Plan,
        entries: Entries,
        rejected: Tensor,
        nearest: Tensor,
        heads: Tensor,
        u: Tensor,
    ) -> Plan:
        """Plan for the other thresholds, without the fused kernel."""
        compared = nearest >= 0  # a head that keeps nothing has nothing to compare with
        rejected, nearest, heads, u = (part[compared] for part in (rejected, nearest, heads, u))
        if not len(rejected):
            return plan
        before = entries.scalars[TAU]
        if self.variant is Variant.CODE:
            judged, mean = _mean_likeness_by_rank(u, heads, len(entries.lengths))
            tau = update_ema(before, mean.expand(len(entries.lengths)), self.beta)
        else:
            judged, tau = u, updated_means(u, heads, before, self.beta)
        plan = replace(plan, scalars={**plan.scalars, TAU: tau})
        if self.threshold is MergeThreshold.EMA:
            alike = judged >= tau[heads] - TIE
            rejected, nearest, u = rejected[alike], nearest[alike], u[alike]
        weights, own = self._merge_weights(rejected, nearest, u, entries)
        counted = torch.ones_like(weights) if self.variant is Variant.CODE else weights
        return self._merged(
            plan, normalized_folds(rejected, nearest, weights, counted, own), entries
        )

    def _merge_weights(
        self, sources: Tensor, targets: Tensor, likeness: Tensor, entries: Entries
    ) -> tuple[Float[Tensor, " F"], float]:
        """Weights of sources, and the weight of their targets."""
        weights = self._weighs
        if weights is Weights.ATTENTION:
            rates = _rates(entries)
            return rates[sources] / rates[targets], 1.0
        if weights is Weights.AVERAGE:
            return torch.ones_like(likeness), 1.0
        return (likeness, 1.0) if weights is None else (likeness.exp(), math.e)

    def _merged(self, plan: Plan, folds: FoldRows, entries: Entries) -> Plan:
        """Plan with these merges; with counts, keys do not change."""
        sources, targets, weights = folds
        if not len(sources):
            return plan
        if not self._counts:
            return replace(plan, folds=Folds(sources, targets, weights, weights))
        is_self = sources == targets
        logs = entries.column(LOG_COUNT).index_add(
            0, targets[is_self], -weights[is_self].double().log().float()
        )
        columns = {**plan.columns, LOG_COUNT: logs[plan.kept]}
        return replace(
            plan, folds=Folds(sources, targets, is_self.float(), weights), columns=columns
        )


def _rates(entries: Entries) -> Float[Tensor, " T"]:
    """Attention that each entry has received per query that could see it; above 0."""
    positions = entries.packed_positions()
    queries = positions.amax() + 1 - positions
    return (entries.column("mass") / queries).clamp(min=torch.finfo(torch.float32).tiny)


def _mean_likeness_by_rank(likeness: Tensor, heads: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Mean likeness over heads at the rank of each rejected entry, and the mean of all."""
    firsts = torch.searchsorted(heads, torch.arange(kv_heads, device=heads.device))
    ranks = torch.arange(len(heads), device=heads.device) - firsts[heads]
    by_rank = group_means(likeness, ranks, int(ranks.max()) + 1)
    return by_rank[ranks], likeness.mean()


Part = FoldEma
