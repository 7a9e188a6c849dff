"""Pooling of scores over neighboring entries."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter


def running_max(scores: Float[Tensor, " S"], width: int) -> Float[Tensor, " S"]:
    """Maximum over a centered window of `width` scores; shorter at the ends.

    Raises:
        BadParameter: `width` is even, so that the window has no center.
    """
    _check(width)
    if not len(scores):
        return scores
    return F.max_pool1d(scores[None], width, stride=1, padding=width // 2)[0]


def running_mean(scores: Float[Tensor, "*rows S"], width: int) -> Float[Tensor, "*rows S"]:
    """Mean over a centered window of `width` scores; zeros beyond the ends.

    Raises:
        BadParameter: `width` is even.
    """
    _check(width)
    if not scores.numel():
        return scores
    rows = scores.reshape(-1, 1, scores.shape[-1])
    return F.avg_pool1d(rows, width, stride=1, padding=width // 2).view(scores.shape)


def _check(width: int) -> None:
    if width < 1 or width % 2 == 0:
        raise BadParameter(f"A pooling width must be odd and at least 1, got {width}.")
