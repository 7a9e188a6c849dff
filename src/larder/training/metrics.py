"""Agreement of predicted scores with labels, per head."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

QUARTER, TENTH = 4, 10


def agreement(predicted: Float[Tensor, "N K"], targets: Float[Tensor, "N K"]) -> dict[str, float]:
    """Means over heads: R2, rank correlation, and overlap of the best quarter and tenth."""
    return {
        "r2": float(explained(predicted, targets).mean()),
        "spearman": float(rank_correlation(predicted, targets).mean()),
        "top_quarter": float(top_overlap(predicted, targets, QUARTER).mean()),
        "top_tenth": float(top_overlap(predicted, targets, TENTH).mean()),
    }


def explained(
    predicted: Float[Tensor, "N K"], targets: Float[Tensor, "N K"]
) -> Float[Tensor, " K"]:
    """R2: share of the variance of the targets that the predictions explain."""
    errors = (targets - predicted).double().square().sum(0)
    spread = (targets - targets.mean(0)).double().square().sum(0)
    return (1 - errors / spread.clamp(min=1e-30)).float()


def rank_correlation(
    predicted: Float[Tensor, "N K"], targets: Float[Tensor, "N K"]
) -> Float[Tensor, " K"]:
    """Spearman's rho; ties are ranked by position."""
    ranks = [values.argsort(0).argsort(0).double() for values in (predicted, targets)]
    centered = [rank - rank.mean(0) for rank in ranks]
    lengths = [rank.square().sum(0).sqrt().clamp(min=1e-30) for rank in centered]
    return ((centered[0] * centered[1]).sum(0) / (lengths[0] * lengths[1])).float()


def top_overlap(
    predicted: Float[Tensor, "N K"], targets: Float[Tensor, "N K"], part: int
) -> Float[Tensor, " K"]:
    """Share of the best 1 / `part` by targets that are among the best by predictions."""
    count = max(len(targets) // part, 1)
    marks = [
        torch.zeros_like(values, dtype=torch.bool).scatter_(0, values.topk(count, 0).indices, True)
        for values in (predicted, targets)
    ]
    return (marks[0] & marks[1]).sum(0) / count
