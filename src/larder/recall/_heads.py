"""How the query heads of a layer agree on pages: the rules of the papers, for every part to use.

Scores come padded, a row per query head, -inf where its kv head has no such page.
"""

from __future__ import annotations

from enum import Enum

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.ops.search import interleaved, top_rows


class QueryHeadRule(Enum):
    """Whose scores decide.

    OWN: every query head has a set of its own.
    INTERLEAVED: one per kv head: the best of each of its query heads, then their seconds, and so
        on, what came before left out (IceCache).
    SUM, MEAN, MAX: one per kv head, by the scores of its query heads joined.
    LAYER_SUM, LAYER_MEAN, LAYER_MAX: one for all, by the scores of all query heads joined. Numbers
        that a kv head lacks count for the others only.
    """

    OWN = "own"
    INTERLEAVED = "interleaved"
    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    LAYER_SUM = "layer_sum"
    LAYER_MEAN = "layer_mean"
    LAYER_MAX = "layer_max"


def select_pages(
    scores: Float[Tensor, "H N"], kv_heads: int, rule: QueryHeadRule, count: int
) -> Int64[Tensor, "F P"]:
    """At most `count` pages per set, the best first, as `Found.pages` takes them."""
    if rule is QueryHeadRule.OWN:
        return top_rows(scores, count)
    if rule is QueryHeadRule.INTERLEAVED:
        return interleaved(top_rows(scores, count), kv_heads, count)
    return top_rows(combine_scores(scores, kv_heads, rule), count)


def combine_scores(
    scores: Float[Tensor, "H N"], kv_heads: int, rule: QueryHeadRule
) -> Float[Tensor, "K N"]:
    """The scores of a group, or of all heads, as one; for the rules that join scores."""
    groups = scores.view(kv_heads, len(scores) // kv_heads, scores.shape[1])  # [K, R, N]
    if rule is QueryHeadRule.MAX:
        return groups.amax(1)
    if rule is QueryHeadRule.SUM:
        return groups.sum(1)
    if rule is QueryHeadRule.MEAN:
        return groups.mean(1)
    lacks = groups.isneginf().all(1)
    return _layer_scores(scores, rule).expand(kv_heads, -1).masked_fill(lacks, -torch.inf)


def _layer_scores(scores: Float[Tensor, "H N"], rule: QueryHeadRule) -> Float[Tensor, " N"]:
    if rule is QueryHeadRule.LAYER_MAX:
        return scores.amax(0)
    has = ~scores.isneginf()
    total = scores.masked_fill(~has, 0.0).sum(0)
    return total if rule is QueryHeadRule.LAYER_SUM else total / has.sum(0).clamp(min=1)
