"""Attention weight of each stored row, summed over the queries of one step.

Weights are those of `ragged_attention` over the same storage: softmax in float32 over the entries
of a kv head, biases included. Meant for a decode step, where a score that accumulates attention
reads the keys once more and the values not at all. Weights carry no gradient.

The CPU kernels in `larder.ops.cpu.attention_weights` are used for the number of query rows that
decode attention supports.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.ops.attention import MOST_LOGITS
from larder.ops.column_statistics import GroupReduction
from larder.ops.cpu import attention_weights as fast
from larder.ops.cpu import decode_attention


def attention_weights(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    scaling: float,
    *,
    group: GroupReduction,
    bias: Float[Tensor, " C"] | None = None,
) -> Float[Tensor, " C"]:
    """Softmax weight of each stored row, summed over queries; 0 in slack rows.

    Args:
        starts, lengths: int64 in host memory, as in `ragged_attention`.
        group: reduction of the R heads of a group, after the sum over their queries.
        bias: added to the logit of each row, in natural log units, finite float32.
    """
    queries, keys = queries.detach(), keys.detach()
    bias = bias if bias is None else bias.detach()
    if decode_attention.supports(queries, keys, keys, lengths.shape[0]):
        return fast.attention_weights(queries, keys, starts, lengths, scaling, group.value, bias)
    weights = keys.new_zeros(keys.shape[0], dtype=torch.float32)
    owned = zip(starts.tolist(), lengths.tolist(), strict=True)
    heads = queries.unflatten(0, (lengths.shape[0], -1))  # [K, R, Q, D]
    for head, (start, length) in zip(heads, owned, strict=True):
        own = slice(start, start + length)
        own_bias = weights.new_zeros(length) if bias is None else bias[own]
        chunk = max(MOST_LOGITS // max(head.shape[0] * length, 1), 1)
        sums = weights.new_zeros(head.shape[0], length)
        for some in head.split(chunk, dim=1):
            logits = some.float() @ keys[own].float().T * scaling + own_bias  # [R, c, S]
            sums += logits.softmax(-1).sum(1)
        weights[own] = group.join(sums)
    return weights


def weights_from_logits(
    logits: Float[Tensor, "R C"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    group: GroupReduction,
) -> Float[Tensor, " C"]:
    """`attention_weights` of one query from its logits, without reading the keys again.

    Args:
        logits: float32, from `ragged_attention`.
    """
    if fast.supports(logits):
        return fast.weights_from_logits(logits, starts, lengths, group.value)
    return group.join(head_weights_from_logits(logits, starts, lengths))


def head_weights_from_logits(
    logits: Float[Tensor, "R C"], starts: Int[Tensor, " K"], lengths: Int[Tensor, " K"]
) -> Float[Tensor, "R C"]:
    """`weights_from_logits` of each of the R heads of a group, without reduction."""
    if fast.supports(logits):
        return fast.head_weights_from_logits(logits, starts, lengths)
    shares = torch.zeros_like(logits)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        own = slice(start, start + length)
        shares[:, own] = logits[:, own].softmax(-1)
    return shares
