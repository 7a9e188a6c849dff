"""Choosing the best, the same way every time."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def top_mask(scores: Float[Tensor, " T"], count: int) -> Bool[Tensor, " T"]:
    """Marks the `count` highest scores. Equal scores: the earlier index wins."""
    return top_masks(scores[None], count)[0]


def top_masks(scores: Float[Tensor, "K S"], count: int) -> Bool[Tensor, "K S"]:
    """`top_mask` of every row."""
    rejected = scores.shape[1] - max(count, 0)
    if rejected <= 0:
        return torch.ones_like(scores, dtype=torch.bool)
    # The best of the rejected: what is above it stays, and of its equals the earliest.
    edge = torch.kthvalue(scores, rejected, dim=1, keepdim=True).values
    keep, equal = scores > edge, scores == edge
    wanted = count - keep.sum(1, keepdim=True)
    return keep | (equal & (equal.cumsum(1) <= wanted))
