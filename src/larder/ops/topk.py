"""Choosing the best, the same way every time."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from larder.ops.cpu import topk


def top_mask(scores: Float[Tensor, " T"], count: int) -> Bool[Tensor, " T"]:
    """Marks the `count` highest scores. Equal scores: the earlier index wins."""
    return top_masks(scores[None], count)[0]


def top_masks(scores: Float[Tensor, "K S"], count: int) -> Bool[Tensor, "K S"]:
    """`top_mask` of every row.

    The readable form is here, the fast one, for host memory, in `larder.ops.cpu.topk`.
    """
    if topk.supports(scores, count):
        return topk.top_masks(scores, count)
    return reference_top_masks(scores, count)


def reference_top_masks(scores: Float[Tensor, "K S"], count: int) -> Bool[Tensor, "K S"]:
    """`top_masks` for every device and any count."""
    rejected = scores.shape[1] - max(count, 0)
    if rejected <= 0:
        return torch.ones_like(scores, dtype=torch.bool)
    # The best of the rejected: what is above it stays, and of its equals the earliest.
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

    A head with fewer entries keeps all. Equal scores: the earlier index wins. The readable form is
    here, the fast one, for the few that go in a decode step on a CPU, in `larder.ops.cpu.topk`.

    Args:
        scores: head by head, without NaN.
        lengths: how many of them each head has.
        spared: which of them stand above all others, as if their scores were infinite.
    """
    if topk.supports_per_head(scores, lengths, count):
        return topk.top_per_head(scores, lengths, count, spared)
    return reference_top_per_head(scores, lengths, count, spared)


def reference_top_per_head(
    scores: Float[Tensor, " T"],
    lengths: tuple[int, ...],
    count: int,
    spared: Bool[Tensor, " T"] | None = None,
) -> Int64[Tensor, " N"]:
    """`top_per_head` for every device and any number that go."""
    if spared is not None:
        scores = scores.masked_fill(spared, torch.inf)
    if len(set(lengths)) == 1:
        marks = top_masks(scores.view(len(lengths), -1), count).flatten()
    else:
        marks = torch.cat([top_mask(head, count) for head in scores.split(list(lengths))])
    return torch.nonzero(marks).flatten()
