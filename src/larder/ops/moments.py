"""Count, mean and spread of numbers of which one more comes.

The readable form is here, the fast one, for host memory, in `larder.ops.cpu.moments`; it gives the
same bits.
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
    """Count, mean and sum of squared deviations with one more number, where it is counted."""
    case = count, mean, spread, numbers, counted
    return fast.added_moments(*case) if fast.supports(numbers) else reference_added_moments(*case)


def reference_added_moments(
    count: Float[Tensor, " S"],
    mean: Float[Tensor, " S"],
    spread: Float[Tensor, " S"],
    numbers: Float[Tensor, " S"],
    counted: Bool[Tensor, " S"],
) -> Moments:
    """`added_moments` for every device."""
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
    """The mean of every entry, packed, raised by 1 for those of a head whose numbers vary most.

    Args:
        count, mean, spread: moments, one of each per row of a flat storage; counts of entries are
            above 0.
        starts, lengths: where each kv head lies in it; int64 in host memory.
        share: of the entries of a head, in [0, 1], that are raised; of equals the first.
    """
    case = count, mean, spread, starts, lengths, share
    return (
        fast.variance_boosted_means(*case)
        if fast.supports(mean)
        else reference_variance_boosted_means(*case)
    )


def reference_variance_boosted_means(
    count: Float[Tensor, " C"],
    mean: Float[Tensor, " C"],
    spread: Float[Tensor, " C"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
    share: float,
) -> Float[Tensor, " T"]:
    """`variance_boosted_means` for every device, one head after the other."""
    parts = [mean[:0]]
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        own = slice(start, start + length)
        raised = top_mask(spread[own] / count[own], int(share * length))
        parts.append(mean[own] + raised.float())
    return torch.cat(parts)


def layer_mean(
    numbers: Float[Tensor, "R C"],
    positions: Int[Tensor, " C"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
) -> Float[Tensor, " S"] | None:
    """The mean of R numbers of each kv head, entry by entry.

    None where heads do not hold the same positions.

    Args:
        numbers, positions: one per row of a flat storage.
        starts, lengths: where each kv head lies in it; int64 in host memory.
    """
    case = numbers, positions, starts, lengths
    return (
        fast.layer_mean(*case)
        if fast.supports_layer_mean(*case[:2])
        else reference_layer_mean(*case)
    )


def reference_layer_mean(
    numbers: Float[Tensor, "R C"],
    positions: Int[Tensor, " C"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
) -> Float[Tensor, " S"] | None:
    """`layer_mean` for every device."""
    counts = lengths.tolist()
    if len(set(counts)) > 1:
        return None
    heads = [slice(start, start + counts[0]) for start in starts.tolist()]
    if any(not torch.equal(positions[own], positions[heads[0]]) for own in heads):
        return None
    return torch.cat([numbers[:, own] for own in heads]).mean(0)
