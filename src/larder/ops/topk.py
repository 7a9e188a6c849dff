"""Choosing the best, the same way every time."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def top_mask(scores: Float[Tensor, " T"], count: int) -> Bool[Tensor, " T"]:
    """Marks the `count` highest scores. Equal scores: the earlier index wins."""
    keep = torch.zeros_like(scores, dtype=torch.bool)
    if count >= len(scores):
        return ~keep
    order = torch.sort(scores, descending=True, stable=True).indices
    keep[order[:count]] = True
    return keep
