"""Which entries of a layer stay, once it is known how many."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Scored
from larder.core.plan import Plan
from larder.ops.topk import top_mask, top_masks


def best_per_head(scored: Scored, tokens: int) -> Plan:
    """Every head keeps its own best `tokens` entries."""
    if len(set(scored.lengths)) == 1:
        rows = top_masks(scored.ranked().view(len(scored.lengths), -1), tokens)
        return Plan.from_mask(rows.flatten(), scored.lengths)
    heads = torch.split(scored.ranked(), list(scored.lengths))
    return Plan.from_mask(torch.cat([top_mask(head, tokens) for head in heads]), scored.lengths)


def best_of_layer(scored: Scored, tokens: int) -> Plan:
    """The heads of a layer compete for `tokens` entries a head."""
    return best_in_all(scored, tokens * len(scored.lengths))


def best_in_all(scored: Scored, count: int) -> Plan:
    """The heads of a layer compete for `count` entries in all."""
    return Plan.from_mask(top_mask(scored.ranked(), count), scored.lengths)


def evenly(scored: Scored, count: int) -> Plan:
    """Heads keep equally many of their own best, `count` in all.

    What a short head leaves goes to the others; where heads cannot have equally many, those with
    the best entry at that place have one more.
    """
    heads = len(scored.lengths)
    if len(set(scored.lengths)) == 1 and count % heads == 0:
        return best_per_head(scored, count // heads)
    ranked = scored.ranked()
    places = torch.cat([_places(head) for head in torch.split(ranked, list(scored.lengths))])
    by_score = torch.argsort(ranked, descending=True, stable=True)
    by_place = by_score[torch.argsort(places[by_score], stable=True)]
    keep = torch.zeros_like(scored.protected)
    keep[by_place[:count]] = True
    return Plan.from_mask(keep, scored.lengths)


def _places(ranked: Tensor) -> Tensor:
    """How many entries of a head come before each."""
    return torch.argsort(torch.argsort(ranked, descending=True, stable=True))


def lifted(scores: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Scores that can be compared as shares: counted from the least where some are below 0."""
    finite = scores[scores.isfinite()]
    least = finite.amin().clamp(max=0.0) if len(finite) else scores.new_zeros(())
    return (scores - least).clamp(min=0.0)


def needed(scored: Scored) -> int:
    """Entries of a layer without which some head could not keep all that is protected in it."""
    most = max(int(part.sum()) for part in torch.split(scored.protected, list(scored.lengths)))
    return min(most * len(scored.lengths), sum(scored.lengths))


SHARE = "share"  # of the average budget, kept as a scalar while text is generated


def standing(scored: Scored, quota: int) -> int:
    """The entries that a layer's share is worth under a quota, rounded down.

    A float32 share may lie a little below the whole number that it stands for.
    """
    return int(float(scored.scalars[SHARE][0]) * quota + 1e-3)


def with_share(plan: Plan, scored: Scored, entries: int, quota: int) -> Plan:
    """A plan that has the cache remember how much of a quota a layer was given."""
    share = scored.scores.new_full((len(scored.lengths),), entries / quota)
    return replace(plan, scalars={SHARE: share})
