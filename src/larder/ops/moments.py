"""Count, mean and spread of numbers of which one more comes.

The readable form is here, the fast one, for host memory, in `larder.ops.fast.moments`; it gives the
same bits.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from larder.ops.fast import moments as fast

Moments = tuple[Float[Tensor, " S"], Float[Tensor, " S"], Float[Tensor, " S"]]


def joined_by_one(
    count: Float[Tensor, " S"],
    mean: Float[Tensor, " S"],
    spread: Float[Tensor, " S"],
    numbers: Float[Tensor, " S"],
    counted: Bool[Tensor, " S"],
) -> Moments:
    """Count, mean and sum of squared deviations with one more number, where it is counted."""
    case = count, mean, spread, numbers, counted
    return fast.joined_by_one(*case) if fast.serves(numbers) else readable_joined_by_one(*case)


def readable_joined_by_one(
    count: Float[Tensor, " S"],
    mean: Float[Tensor, " S"],
    spread: Float[Tensor, " S"],
    numbers: Float[Tensor, " S"],
    counted: Bool[Tensor, " S"],
) -> Moments:
    """`joined_by_one` for every device."""
    fresh = counted.to(count.dtype)
    total, shift = count + fresh, numbers - mean
    share = fresh / total.clamp(min=1)
    return total, mean + shift * share, spread + shift.square() * count * share
