"""Running moments per entry: count, mean and sum of squared deviations (Welford).

The CPU kernels in `larder.ops.cpu.moments` give the same bits as torch.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from larder.ops.cpu import moments as fast
from larder.ops.topk import top_mask

Moments = tuple[Float[Tensor, " S"], Float[Tensor, " S"], Float[Tensor, " S"]]


def added_moments(
    count: Float[Tensor, " S"],
    mean: Float[Tensor, " S"],
    spread: Float[Tensor, " S"],
    numbers: Float[Tensor, " S"],
    counted: Bool[Tensor, " S"],
) -> Moments:
    """Count, mean and sum of squared deviations after one more number, where it is counted."""
    if fast.supports(numbers):
        return fast.added_moments(count, mean, spread, numbers, counted)
    fresh = counted.to(count.dtype)
    total, shift = count + fresh, numbers - mean
    share = fresh / total.clamp(min=1)
    return total, mean + shift * share, spread + shift.square() * count * share


def variance_boosted_means(
    count: Float[Tensor, " C"],
    mean: Float[Tensor, " C"],
    spread: Float[Tensor, " C"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
    share: float,
) -> Float[Tensor, " T"]:
    """Mean of every entry, packed, plus 1 for the entries of a head with the highest variance.

    Args:
        count, mean, spread: moments, one of each per row of a flat storage; counts of entries are
            above 0.
        starts, lengths: rows of each kv head in the storage; int64 in host memory.
        share: of the entries of a head, in [0, 1], that get the 1; ties go to the first.
    """
    parts = [mean[:0]]
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        span = slice(start, start + length)
        raised = top_mask(spread[span] / count[span], int(share * length))
        parts.append(mean[span] + raised.float())
    return torch.cat(parts)


def layer_mean(
    numbers: Float[Tensor, "R C"],
    positions: Int[Tensor, " C"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
) -> Float[Tensor, " S"] | None:
    """Mean over R numbers and all kv heads, entry by entry.

    None if the heads have different positions.

    Args:
        numbers, positions: one per row of a flat storage.
        starts, lengths: rows of each kv head in the storage; int64 in host memory.
    """
    if fast.supports_layer_mean(numbers, positions):
        return fast.layer_mean(numbers, positions, starts, lengths)
    counts = lengths.tolist()
    if len(set(counts)) > 1:
        return None
    heads = [slice(start, start + counts[0]) for start in starts.tolist()]
    if any(not torch.equal(positions[head], positions[heads[0]]) for head in heads):
        return None
    return torch.cat([numbers[:, head] for head in heads]).mean(0)
