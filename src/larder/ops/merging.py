"""Join attention over parts of a cache into attention over the whole.

Attention over a set of entries is a weighted mean whose total weight is the exponential of its
log-sum-exp. Means of disjoint parts join exactly, so a cache may be attended in pieces: cached
entries and new tokens, tiers, pages. Tri Dao et al., "FlashAttention: Fast and Memory-Efficient
Exact Attention with IO-Awareness" (2022), arXiv 2205.14135, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def merge_attention(
    outs: Sequence[Float[Tensor, "*rows D"]], lses: Sequence[Float[Tensor, "*rows"]]
) -> tuple[Float[Tensor, "*rows D"], Float[Tensor, "*rows"]]:
    """Attention over all parts together, in float32.

    Args:
        outs: what each part alone gave; a part in which a query saw nothing gave it 0.
        lses: the log-sum-exp of each part; -inf where a query saw nothing.

    Returns:
        Output and log-sum-exp of the whole; 0 and -inf where no part had anything to see.
    """
    if len(outs) == 1:
        return outs[0].float(), lses[0].float()
    parts = torch.stack([lse.float() for lse in lses])  # [parts, *rows]
    lse = parts.logsumexp(0)
    # Clamped, because a softmax of -inf alone is NaN; what such a part gives is 0 anyway.
    shares = parts.clamp(min=torch.finfo(torch.float32).min).softmax(0).unsqueeze(-1)
    whole = shares[0] * outs[0].float()
    for share, out in zip(shares[1:], outs[1:], strict=True):
        whole = torch.addcmul(whole, share, out.float())
    return whole, lse
