"""Which entries of a layer stay, once it is known how many."""

from __future__ import annotations

import torch

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
    count = tokens * len(scored.lengths)
    return Plan.from_mask(top_mask(scored.ranked(), count), scored.lengths)
