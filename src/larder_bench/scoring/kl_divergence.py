"""KL divergence of next-token distributions from those of the full cache.

Solomon Kullback and Richard A. Leibler, "On Information and Sufficiency" (1951), Annals of
Mathematical Statistics 22(1): nats that are lost per token by believing the second distribution
where the first holds.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK = 8192  # vocabulary entries processed together; bounds temporary memory


def kl_divergence(
    true: Float[Tensor, "N V"], believed: Float[Tensor, "N V"], chunk: int = CHUNK
) -> Float[Tensor, " N"]:
    """KL(true || believed) of each row, in nats, from logits.

    Args:
        chunk: vocabulary entries processed at a time.
    """
    norms = true.logsumexp(-1), believed.logsumexp(-1)
    total = torch.zeros_like(norms[0], dtype=torch.float64)
    for one, other in zip(true.split(chunk, 1), believed.split(chunk, 1), strict=True):
        one = one.double() - norms[0][:, None]
        other = other.double() - norms[1][:, None]
        total += (one.exp() * (one - other)).sum(-1)
    return total.clamp_min(0).float()  # rounding may give slightly negative sums
