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

from larder.ops.attention import MOST_LOGITS, NO_SINKS, cap_logits, sink_shares, sinks_by_group
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
    softcap: float | None = None,
    sinks: Float[Tensor, " _"] = NO_SINKS,
) -> Float[Tensor, " C"]:
    """Softmax weight of each stored row, summed over queries; 0 in slack rows.

    Args:
        starts, lengths: int64 in host memory, as in `ragged_attention`.
        group: reduction of the R heads of a group, after the sum over their queries.
        bias: added to the logit of each row, in natural log units, finite float32.
        softcap, sinks: as in `ops.attention`.
    """
    queries, keys = queries.detach(), keys.detach()
    bias = bias if bias is None else bias.detach()
    is_plain = softcap is None and not len(sinks)
    if is_plain and decode_attention.supports(queries, keys, keys, lengths.shape[0]):
        return fast.attention_weights(queries, keys, starts, lengths, scaling, group.value, bias)
    weights = keys.new_zeros(keys.shape[0], dtype=torch.float32)
    owned = zip(starts.tolist(), lengths.tolist(), strict=True)
    heads = queries.unflatten(0, (lengths.shape[0], -1))  # [K, R, Q, D]
    own_sinks = sinks_by_group(sinks, lengths.shape[0])
    for head, sink, (start, length) in zip(heads, own_sinks, owned, strict=True):
        span = slice(start, start + length)
        own_bias = weights.new_zeros(length) if bias is None else bias[span]
        chunk = max(MOST_LOGITS // max(head.shape[0] * length, 1), 1)
        sums = weights.new_zeros(head.shape[0], length)
        for some in head.split(chunk, dim=1):
            logits = cap_logits(some.float() @ keys[span].float().T * scaling, softcap)
            sums += softmax_with_sinks(logits + own_bias, sink).sum(1)
        weights[span] = group.join(sums)
    return weights


def softmax_with_sinks(
    logits: Float[Tensor, "R *Q S"], sinks: Float[Tensor, " _"]
) -> Float[Tensor, "R *Q S"]:
    """Softmax over S entries and the sink of each query head, whose weight is left out.

    Args:
        sinks: one logit for each of the R heads; empty without sinks.
    """
    weights = logits.softmax(-1)
    if not len(sinks):
        return weights
    return weights * sink_shares(logits.logsumexp(-1), sinks).unsqueeze(-1)


def weights_from_logits(
    logits: Float[Tensor, "R C"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    group: GroupReduction,
    sinks: Float[Tensor, " _"] = NO_SINKS,
) -> Float[Tensor, " C"]:
    """`attention_weights` of one query from its logits, without reading the keys again.

    Args:
        logits: float32, from `ragged_attention`.
    """
    if fast.supports(logits) and not len(sinks):
        return fast.weights_from_logits(logits, starts, lengths, group.value)
    return group.join(head_weights_from_logits(logits, starts, lengths, sinks))


def head_weights_from_logits(
    logits: Float[Tensor, "R C"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    sinks: Float[Tensor, " _"] = NO_SINKS,
) -> Float[Tensor, "R C"]:
    """`weights_from_logits` of each of the R heads of a group, without reduction."""
    if fast.supports(logits) and not len(sinks):
        return fast.head_weights_from_logits(logits, starts, lengths)
    shares = torch.zeros_like(logits)
    own_sinks = sinks_by_group(sinks, lengths.shape[0])
    for start, length, sink in zip(starts.tolist(), lengths.tolist(), own_sinks, strict=True):
        span = slice(start, start + length)
        shares[:, span] = softmax_with_sinks(logits[:, span], sink)
    return shares
