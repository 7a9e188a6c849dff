"""Top-k selection of entries within a layer, for a given number of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.observation import LayerScores
from larder.core.plan import Plan
from larder.ops.topk import top_mask, top_per_head

NO_WEIGHT = 1e-9  # weight of a head without weight, relative to the largest of its layer
SHARE = "share"  # ledger scalar: the layer's share of the average budget, used in decode


def top_k_per_head(scored: LayerScores, tokens: int) -> Plan:
    """Plan in which every head keeps its own best `tokens` entries."""
    kept = top_per_head(scored.scores, scored.lengths, tokens, scored.protected)
    return Plan(kept, tuple(min(length, max(tokens, 0)) for length in scored.lengths))


def top_k_per_layer(scored: LayerScores, tokens: int) -> Plan:
    """Plan in which the heads of a layer compete for `tokens` entries per head on average."""
    return top_k_total(scored, tokens * len(scored.lengths))


def top_k_total(scored: LayerScores, count: int) -> Plan:
    """Plan in which the heads of a layer compete for `count` entries in total."""
    return Plan.from_mask(top_mask(scored.ranked(), count), scored.lengths)


def top_k_even(scored: LayerScores, count: int) -> Plan:
    """Plan in which heads keep equally many of their own best, `count` in total.

    The unused part of a short head goes to the others; where `count` does not divide evenly, the
    heads with the best entry at that rank keep one more.
    """
    heads = len(scored.lengths)
    if len(set(scored.lengths)) == 1 and count % heads == 0:
        return top_k_per_head(scored, count // heads)
    ranked = scored.ranked()
    indices = torch.cat([_ranks(head) for head in torch.split(ranked, list(scored.lengths))])
    by_score = torch.argsort(ranked, descending=True, stable=True)
    by_place = by_score[torch.argsort(indices[by_score], stable=True)]
    keep = torch.zeros_like(scored.protected)
    keep[by_place[:count]] = True
    return Plan.from_mask(keep, scored.lengths)


def top_k_by_head_weight(scored: LayerScores, count: int, base: int = 0) -> Plan:
    """Plan in which heads keep their own best, `count` in total, in proportion to head weights.

    Protected entries come first, then `base` entries of every head. Further entries are divided in
    proportion to the weights, by Sainte-Lague rounding; a head of weight 0 gets entries only when
    the others have no more. Ties go to the better entry.
    """
    ranked, heads = scored.ranked(), len(scored.lengths)
    weights = list(scored.weights) if max(scored.weights, default=0.0) > 0 else [1.0] * heads
    turns = [
        _selection_order(head, shields, max(weight / max(weights), NO_WEIGHT), base)
        for head, shields, weight in zip(
            torch.split(ranked, list(scored.lengths)),
            torch.split(scored.protected, list(scored.lengths)),
            weights,
            strict=True,
        )
    ]
    by_score = torch.argsort(ranked, descending=True, stable=True)
    order = by_score[torch.argsort(torch.cat(turns)[by_score], stable=True)]
    keep = torch.zeros_like(scored.protected)
    keep[order[:count]] = True
    return Plan.from_mask(keep, scored.lengths)


def _selection_order(ranked: Tensor, protected: Tensor, weight: float, base: int) -> Tensor:
    """Sort key of a head's entries: the lowest is taken first."""
    order = torch.argsort(ranked, descending=True, stable=True)
    order = order[torch.argsort(protected[order].int(), stable=True)]
    beyond = torch.empty_like(ranked, dtype=torch.float64)
    beyond[order] = torch.arange(len(ranked), device=ranked.device).double() - base
    turns = torch.where(beyond < 0, beyond, (beyond + 0.5) / weight)
    return turns.masked_fill(protected, -torch.inf)


def _ranks(ranked: Tensor) -> Tensor:
    """Rank of each entry in its head, 0 the best."""
    return torch.argsort(torch.argsort(ranked, descending=True, stable=True))


def shift_non_negative(scores: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Scores shifted to at least 0 where some are negative, so that they compare as shares."""
    finite = scores[scores.isfinite()]
    least = finite.amin().clamp(max=0.0) if len(finite) else scores.new_zeros(())
    return (scores - least).clamp(min=0.0)


def with_layer_protection(scored: LayerScores, tokens: int) -> LayerScores:
    """Scores with protected shares relative to `tokens` entries per head of this layer."""
    protection = scored.protection
    return scored if protection is None else replace(scored, protected=protection(tokens))


def min_entries(scored: LayerScores) -> int:
    """Fewest entries of a layer with which every head can keep its protected entries."""
    most = max(int(part.sum()) for part in torch.split(scored.protected, list(scored.lengths)))
    return min(most * len(scored.lengths), sum(scored.lengths))


def entries_from_share(scored: LayerScores, quota: int) -> int:
    """Entries of a layer by its recorded share of a quota, rounded down."""
    return share_of_quota(float(scored.scalars[SHARE][0]), quota)


def share_of_quota(share: float, quota: int) -> int:
    """Share of a quota, rounded down.

    A float32 share may be slightly below the exact quotient, hence the tolerance.
    """
    return int(share * quota + 1e-3)


def with_share(plan: Plan, scored: LayerScores, entries: int, quota: int) -> Plan:
    """Plan that stores the layer's share of its quota as a ledger scalar."""
    share = scored.scores.new_full((len(scored.lengths),), entries / quota)
    return replace(plan, scalars={SHARE: share})
