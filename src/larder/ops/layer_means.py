"""The mean over all heads of a layer, in one reading of numbers that lie as a storage does.

The readable form is here, the fast one, for host memory, in `larder.ops.cpu.layer_means`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from larder.ops.cpu import layer_means as fast


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
