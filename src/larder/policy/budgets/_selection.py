"""Which entries of a layer stay, once it is known how many."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.observation import LayerScores
from larder.core.plan import Plan
from larder.ops.topk import top_mask, top_per_head


def top_k_per_head(scored: LayerScores, tokens: int) -> Plan:
    """Every head keeps its own best `tokens` entries."""
    kept = top_per_head(scored.scores, scored.lengths, tokens, scored.protected)
    return Plan(kept, tuple(min(length, max(tokens, 0)) for length in scored.lengths))


def top_k_per_layer(scored: LayerScores, tokens: int) -> Plan:
    """The heads of a layer compete for `tokens` entries a head."""
    return top_k_total(scored, tokens * len(scored.lengths))


def top_k_total(scored: LayerScores, count: int) -> Plan:
    """The heads of a layer compete for `count` entries in all."""
    return Plan.from_mask(top_mask(scored.ranked(), count), scored.lengths)


def top_k_even(scored: LayerScores, count: int) -> Plan:
    """Heads keep equally many of their own best, `count` in all.

    What a short head leaves goes to the others; where heads cannot have equally many, those with
    the best entry at that place have one more.
    """
    heads = len(scored.lengths)
    if len(set(scored.lengths)) == 1 and count % heads == 0:
        return top_k_per_head(scored, count // heads)
    ranked = scored.ranked()
    places = torch.cat([_ranks(head) for head in torch.split(ranked, list(scored.lengths))])
    by_score = torch.argsort(ranked, descending=True, stable=True)
    by_place = by_score[torch.argsort(places[by_score], stable=True)]
    keep = torch.zeros_like(scored.protected)
    keep[by_place[:count]] = True
    return Plan.from_mask(keep, scored.lengths)


def top_k_by_head_weight(scored: LayerScores, count: int, base: int = 0) -> Plan:
    """Heads keep their own best, `count` in all: some each, beyond that as their weights say.

    What is protected stays first. The entries that a head has beyond it and `base` are to its
    weight as those of any other head, as nearly as whole numbers can be (Sainte-Lague); a head
    without weight has its turn when the others have no more. Where heads are on a par, the better
    entry stays.
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
    """When each entry of a head is taken: the lowest first."""
    order = torch.argsort(ranked, descending=True, stable=True)
    order = order[torch.argsort(protected[order].int(), stable=True)]
    beyond = torch.empty_like(ranked, dtype=torch.float64)
    beyond[order] = torch.arange(len(ranked), device=ranked.device).double() - base
    turns = torch.where(beyond < 0, beyond, (beyond + 0.5) / weight)
    return turns.masked_fill(protected, -torch.inf)


def _ranks(ranked: Tensor) -> Tensor:
    """How many entries of a head come before each."""
    return torch.argsort(torch.argsort(ranked, descending=True, stable=True))


def shift_non_negative(scores: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Scores that can be compared as shares: counted from the least where some are below 0."""
    finite = scores[scores.isfinite()]
    least = finite.amin().clamp(max=0.0) if len(finite) else scores.new_zeros(())
    return (scores - least).clamp(min=0.0)


def with_layer_protection(scored: LayerScores, tokens: int) -> LayerScores:
    """The same where the layer keeps `tokens` entries per head: protected shares are of these."""
    protection = scored.protection
    return scored if protection is None else replace(scored, protected=protection(tokens))


def min_entries(scored: LayerScores) -> int:
    """Entries of a layer without which some head could not keep all that is protected in it."""
    most = max(int(part.sum()) for part in torch.split(scored.protected, list(scored.lengths)))
    return min(most * len(scored.lengths), sum(scored.lengths))


NO_WEIGHT = 1e-9  # next to the heaviest head of a layer
SHARE = "share"  # of the average budget, kept as a scalar while text is generated


def entries_from_share(scored: LayerScores, quota: int) -> int:
    """The entries that a layer's share is worth under a quota, rounded down.

    A float32 share may lie a little below the whole number that it stands for.
    """
    return int(float(scored.scalars[SHARE][0]) * quota + 1e-3)


def with_share(plan: Plan, scored: LayerScores, entries: int, quota: int) -> Plan:
    """A plan that has the cache remember how much of a quota a layer was given."""
    share = scored.scores.new_full((len(scored.lengths),), entries / quota)
    return replace(plan, scalars={SHARE: share})
