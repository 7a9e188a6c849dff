"""Attention to a low-rank state, in place of the entries that it sums up.

    features of keys     psi(k)  [K, N, 8]     state of a kv head  sum psi(k)' [v, 1]  [8, D + 1]
    features of queries  phi(q)  [H, Q, 8]     attention           phi(q) state

The last column of the state sums the features, so that its product with phi(q) is a softmax
denominator: its logarithm merges with the log-sum-exp of other entries. Features are not negative,
and those of a zero vector are zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

RANK = 8  # features of a key or query
STATE_DTYPE = torch.float32


def state_bytes(head_dim: int) -> int:
    """Bytes of the state of one kv head."""
    return RANK * (head_dim + 1) * STATE_DTYPE.itemsize


def query_features(
    queries: Float[Tensor, "H Q D"],
    hidden: Float[Tensor, "H D inner"],
    outer: Float[Tensor, "H inner rank"],
) -> Float[Tensor, "H Q rank"]:
    """Features of queries: a perceptron of each query head."""
    return F.gelu(F.gelu(queries.to(hidden.dtype) @ hidden) @ outer).abs()


def key_features(
    keys: Float[Tensor, "K N D"],
    hidden: Float[Tensor, "K D inner"],
    outer: Float[Tensor, "K inner rank"],
    scale: Float[Tensor, "K 1 rank"],
    interaction: Float[Tensor, "K rank rank"],
) -> Float[Tensor, "K N rank"]:
    """Features of keys: a scaled perceptron of each kv head, whose outputs are then mixed.

    Args:
        interaction: added share of every output in every other.
    """
    plain = scale.abs() * F.gelu(F.gelu(keys.to(hidden.dtype) @ hidden) @ outer)
    return (plain + plain @ interaction).abs()


def low_rank_state(
    features: Float[Tensor, "K N rank"], values: Float[Tensor, "K N D"]
) -> Float[Tensor, "K rank E"]:
    """State of entries with these features; states of several sets of entries add up."""
    ones = torch.ones_like(values[..., :1])
    return features.transpose(1, 2) @ torch.cat([values, ones], 2).to(features.dtype)


def low_rank_attention(
    features: Float[Tensor, "H Q rank"], state: Float[Tensor, "K rank E"]
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """Attention of queries to the entries of a state, with its log-sum-exp.

    A query whose features meet nothing gets output 0, with a log-sum-exp of about -87.
    """
    groups = features.unflatten(0, (len(state), -1)).flatten(1, 2)  # [K, R Q, rank]
    sums = (groups @ state).view(*features.shape[:2], -1)
    total = sums[..., -1].clamp(min=torch.finfo(sums.dtype).tiny)
    return sums[..., :-1] / total[..., None], total.log()
