"""Attention of new tokens over earlier entries and themselves, with gradients in bounded memory.

The queries, keys and values of the new tokens get gradients; earlier entries get none. The backward
pass computes the weights again, for some queries at a time, so that neither pass holds the weights
of all queries. Autograd through the same formula holds several copies of them in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from larder.ops.attention import cap_logits
from larder.ops.attention_weights import softmax_with_sinks

MOST_LOGITS = 1 << 19  # held at once, of all query heads of a kv head: they fit a core's cache


@dataclass(frozen=True)
class EarlierEntries:
    """Entries of one kv head, and what its logits take beside keys.

    Args:
        positions: true positions of the entries.
        query_positions: true positions of the new tokens.
        first_visible: lowest position that each new token sees.
        scaling, softcap: of the logits.
        sinks: logit of each query head; empty without sinks.
        bias: added to the logit of each entry; None for no bias.
    """

    keys: Float[Tensor, "C D"]
    values: Float[Tensor, "C Dv"]
    positions: Int[Tensor, " C"]
    query_positions: Int[Tensor, " Q"]
    first_visible: Int[Tensor, " Q"]
    scaling: float
    softcap: float | None
    sinks: Float[Tensor, " _"]
    bias: Float[Tensor, " C"] | None = None


def attend_with_gradients(
    queries: Float[Tensor, "R Q D"],
    keys: Float[Tensor, "Q D"],
    values: Float[Tensor, "Q Dv"],
    earlier: EarlierEntries,
) -> Float[Tensor, "R Q Dv"]:
    """Attention of the query heads of one kv head, in float32.

    Args:
        queries, keys, values: of the new tokens.
    """
    return _RecomputedAttention.apply(queries.float(), keys.float(), values.float(), earlier)


class _RecomputedAttention(torch.autograd.Function):
    """Attention that keeps queries, keys, values and output alone for its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, earlier: EarlierEntries
    ) -> Tensor:
        every_value = torch.cat([earlier.values.float(), values])
        blocks = _weight_blocks(queries, keys, earlier)
        out = torch.cat([weights @ every_value for _, weights, _ in blocks], dim=1)
        ctx.save_for_backward(queries, keys, values, out)
        ctx.earlier = earlier
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, out = ctx.saved_tensors
        earlier: EarlierEntries = ctx.earlier
        num_earlier = len(earlier.keys)
        every_key = torch.cat([earlier.keys.float(), keys])
        every_value = torch.cat([earlier.values.float(), values])
        query_gradients = torch.empty_like(queries)
        key_gradients, value_gradients = torch.zeros_like(keys), torch.zeros_like(values)
        for rows, weights, slopes in _weight_blocks(queries, keys, earlier):
            gradients = out_gradients[:, rows]  # [R, q, Dv]
            own = weights[..., num_earlier:].flatten(0, 1)  # [R q, Q]
            value_gradients += own.T @ gradients.flatten(0, 1)
            mean = (gradients * out[:, rows]).sum(-1, keepdim=True)
            logit_gradients = (gradients @ every_value.T).sub_(mean).mul_(weights)  # [R, q, S]
            if slopes is not None:
                logit_gradients *= slopes
            logit_gradients *= earlier.scaling
            query_gradients[:, rows] = logit_gradients @ every_key
            own = logit_gradients[..., num_earlier:].flatten(0, 1)
            key_gradients += own.T @ queries[:, rows].flatten(0, 1)
        return query_gradients, key_gradients, value_gradients, None


def _weight_blocks(
    queries: Float[Tensor, "R Q D"], keys: Float[Tensor, "Q D"], earlier: EarlierEntries
) -> Iterator[tuple[slice, Float[Tensor, "R q S"], Float[Tensor, "R q S"] | None]]:
    """Rows of queries, their weights, and the derivative of the softcap where there is one."""
    every_key = torch.cat([earlier.keys.float(), keys])
    positions = torch.cat([earlier.positions, earlier.query_positions])
    bias = None
    if earlier.bias is not None:
        bias = torch.cat([earlier.bias, earlier.bias.new_zeros(len(keys))])
    size = max(MOST_LOGITS // max(queries.shape[0] * len(every_key), 1), 1)
    for start in range(0, queries.shape[1], size):
        rows = slice(start, min(start + size, queries.shape[1]))
        logits = cap_logits(queries[:, rows] @ every_key.T * earlier.scaling, earlier.softcap)
        slopes = None if earlier.softcap is None else 1 - (logits / earlier.softcap).square()
        if bias is not None:
            logits = logits + bias
        seen, first = earlier.query_positions[rows, None], earlier.first_visible[rows, None]
        logits = logits.masked_fill((positions > seen) | (positions < first), -torch.inf)
        yield rows, softmax_with_sinks(logits, earlier.sinks), slopes
