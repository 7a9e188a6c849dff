"""Top-k selection on a CPU, by radix counting instead of sorting."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from larder.ops.cpu.c_library import c_library, integers

MAX_SCORES = 1 << 17  # above it torch with all threads is faster
MAX_REJECTED = 4  # per kv head, as in c/removal.c; above it a selection over all scores is faster


def supports(scores: Tensor, count: int) -> bool:
    """True for float32 in host memory of which some are rejected."""
    return (
        scores.device.type == "cpu"
        and scores.dtype is torch.float32
        and 0 < count < scores.shape[1]
        and scores.numel() <= MAX_SCORES
    )


def top_masks(scores: Float[Tensor, "K S"], count: int) -> Bool[Tensor, "K S"]:
    """Kernel of `top_masks`; thread-safe."""
    library, scores = c_library(), scores.detach().contiguous()
    marks = torch.empty(scores.shape, dtype=torch.bool)
    if library is None:
        from larder.ops.cpu import topk_kernels as kernels  # compiles: not before it is needed

        kernels.mark_highest(scores.numpy(), count, marks.numpy())
    elif library.larder_top_masks(scores.data_ptr(), *scores.shape, count, marks.data_ptr()):
        raise MemoryError("The selection of entries could not allocate its buffers.")
    return marks


def supports_per_head(scores: Tensor, lengths: tuple[int, ...], count: int) -> bool:
    """True for float32 in host memory of which few are rejected."""
    return (
        scores.device.type == "cpu"
        and scores.dtype is torch.float32
        and 0 <= count
        and max(lengths, default=0) - count <= MAX_REJECTED
    )


def top_per_head(
    scores: Float[Tensor, " T"],
    lengths: tuple[int, ...],
    count: int,
    spared: Bool[Tensor, " T"] | None = None,
) -> Int64[Tensor, " N"]:
    """Kernel of `top_per_head`; thread-safe."""
    library, scores = c_library(), scores.detach().contiguous()
    kept = torch.empty(sum(min(length, count) for length in lengths), dtype=torch.int64)
    spared = None if spared is None else spared.contiguous()
    if library is None:
        from larder.ops.cpu import topk_kernels as kernels  # compiles: not before it is needed

        marks = np.empty(0, np.bool_) if spared is None else spared.numpy()
        numbers, counts = scores.numpy(), np.array(lengths, np.int64)
        kernels.keep_highest(numbers, marks, counts, count, kept.numpy())
        return kept
    library.larder_keep_highest(
        scores.data_ptr(),
        None if spared is None else spared.data_ptr(),
        integers(lengths),
        len(lengths),
        count,
        kept.data_ptr(),
    )
    return kept
