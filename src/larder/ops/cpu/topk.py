"""Selection on a CPU: the best of each row are found by counting, not by moving scores about."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_SCORES = 1 << 17  # from there on torch's threads are faster together


def supports(scores: Tensor, count: int) -> bool:
    """Whether the kernel takes this call: float32 in host memory, some of which go."""
    return (
        scores.device.type == "cpu"
        and scores.dtype is torch.float32
        and 0 < count < scores.shape[1]
        and scores.numel() <= MAX_SCORES
    )


def top_masks(scores: Float[Tensor, "K S"], count: int) -> Bool[Tensor, "K S"]:
    """Safe from several threads at once."""
    from larder.ops.cpu import topk_kernels as kernels  # compiles: not before it is needed

    marks = torch.empty(scores.shape, dtype=torch.bool)
    kernels.mark_highest(scores.detach().contiguous().numpy(), count, marks.numpy())
    return marks
