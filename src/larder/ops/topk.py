"""Deterministic top-k selection: ties go to the earlier index."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from larder.ops.cpu import topk as fast


def top_mask(scores: Float[Tensor, " T"], count: int) -> Bool[Tensor, " T"]:
    """Mask of the `count` highest scores."""
    return top_masks(scores[None], count)[0]


def top_masks(scores: Float[Tensor, "K S"], count: int) -> Bool[Tensor, "K S"]:
    """`top_mask` of every row; by the kernel in `larder.ops.cpu.topk` where it applies."""
    if fast.supports(scores, count):
        return fast.top_masks(scores, count)
    rejected = scores.shape[1] - max(count, 0)
    if rejected <= 0:
        return torch.ones_like(scores, dtype=torch.bool)
    # Highest rejected score: all above it are selected, and of its equals the earliest.
    edge = torch.kthvalue(scores, rejected, dim=1, keepdim=True).values
    keep, equal = scores > edge, scores == edge
    wanted = count - keep.sum(1, keepdim=True)
    return keep | (equal & (equal.cumsum(1) <= wanted))


def top_per_head(
    scores: Float[Tensor, " T"],
    lengths: tuple[int, ...],
    count: int,
    spared: Bool[Tensor, " T"] | None = None,
) -> Int64[Tensor, " N"]:
    """Indices, ascending, of the `count` highest scores of every head.

    A head with fewer entries keeps all. The kernel in `larder.ops.cpu.topk` is used where few
    entries are rejected, as in a decode step.

    Args:
        scores: head by head, without NaN.
        lengths: number of scores of each head.
        spared: mask of entries that rank above all others, as if their scores were infinite.
    """
    if fast.supports_per_head(scores, lengths, count):
        return fast.top_per_head(scores, lengths, count, spared)
    if spared is not None:
        scores = scores.masked_fill(spared, torch.inf)
    if len(set(lengths)) == 1:
        marks = top_masks(scores.view(len(lengths), -1), count).flatten()
    else:
        marks = torch.cat([top_mask(head, count) for head in scores.split(list(lengths))])
    return torch.nonzero(marks).flatten()
