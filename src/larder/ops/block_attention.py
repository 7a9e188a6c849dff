"""Attention of a block of new tokens: to the entries of a cache, and causally among themselves.

Beside it, the sum of the weights that each entry receives, which scores by accumulated attention
are made of: over all queries of the block and the query heads that share a kv head. The CPU kernel
in `larder.ops.cpu.block_attention` computes both in one pass over the logits. Without it, torch
attends, and sums come from a second pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.ops.attention import causal_attention, merge_attention, needs_gradient, ragged_attention
from larder.ops.cpu import block_attention as fast

CHUNK = 64  # queries whose weights are in memory at a time, where torch sums them
FEWEST_QUERIES = 32  # of a block; for fewer, packing keys costs more than it saves


@dataclass(frozen=True)
class BlockAttention:
    """Call of `block_attention`, made alone or in one call with other segments of a pass."""

    queries: Float[Tensor, "H Q D"]
    keys: Float[Tensor, "C D"]
    values: Float[Tensor, "C D"]
    starts: Int64[Tensor, " K"]
    lengths: Int64[Tensor, " K"]
    new_keys: Float[Tensor, "K Q D"]
    new_values: Float[Tensor, "K Q D"]
    scaling: float
    bias: Float[Tensor, " C"] | None = None
    sums: Float[Tensor, " T"] | None = None

    def __call__(self) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
        stored = self.queries, self.keys, self.values, self.starts, self.lengths
        new = self.new_keys, self.new_values
        return block_attention(*stored, *new, self.scaling, self.bias, self.sums)

    @property
    def can_join(self) -> bool:
        """True if `work` serves it: where the kernel is supported, and faster than torch."""
        queries, *stored = self.queries, self.keys, self.values
        new = self.new_keys, self.new_values
        is_fast = fast.supports(queries, *stored) and not needs_gradient(queries, *stored, *new)
        return is_fast and fast.is_faster(self.keys.dtype, self.keys.shape[1])

    def work(self) -> fast.BlockWork:
        """Arguments and outputs of the kernel, which `can_join`."""
        return fast.BlockWork(
            self.queries,
            self.keys,
            self.values,
            self.starts,
            self.lengths,
            self.new_keys,
            self.new_values,
            _limits(self.lengths, self.queries.shape[1]),
            self.scaling,
            self.bias,
            self.sums,
        )


def block_attention(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "C D"],
    values: Float[Tensor, "C D"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
    new_keys: Float[Tensor, "K Q D"],
    new_values: Float[Tensor, "K Q D"],
    scaling: float,
    bias: Float[Tensor, " C"] | None = None,
    sums: Float[Tensor, " T"] | None = None,
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """Output and log-sum-exp, in float32.

    Args:
        starts, lengths: rows of each kv head in the flat storage; int64 in host memory.
        bias: as in `ragged_attention`, of the stored rows.
        sums: output buffer for the sum of the weights of each entry, head by head, the new tokens
            behind the stored entries; None for none.
    """
    stored, layout = (keys, values), (starts, lengths)
    new, rest = (new_keys, new_values), (scaling, bias)
    is_fast = fast.supports(queries, keys, values) and not needs_gradient(queries, *stored, *new)
    if is_fast and fast.is_faster(keys.dtype, keys.shape[1]):
        limits = _limits(lengths, queries.shape[1])
        return fast.block_attention(queries, *stored, *layout, *new, limits, *rest, sums)
    if sums is not None and is_fast:
        limits = _limits(lengths, queries.shape[1])
        fast.block_attention(queries, *stored, *layout, *new, limits, *rest, sums, attends=False)
    elif sums is not None:
        sums.copy_(summed_weights(queries, keys, *layout, new_keys, *rest))
    parts = [causal_attention(queries, *new, scaling, (queries.shape[1],))]
    if lengths.any():
        parts.insert(0, ragged_attention(queries, *stored, *layout, *rest))
    return merge_attention([out for out, _ in parts], [lse for _, lse in parts])


def summed_weights(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "C D"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
    new_keys: Float[Tensor, "K Q D"],
    scaling: float,
    bias: Float[Tensor, " C"] | None = None,
) -> Float[Tensor, " T"]:
    """The sums of `block_attention` by torch, without gradient."""
    query_len = queries.shape[1]
    heads: list[Tensor] = []
    groups = queries.detach().unflatten(0, (len(lengths), -1))  # [K, R, Q, D]
    layout = zip(groups, new_keys.detach(), starts.tolist(), lengths.tolist(), strict=True)
    for group, fresh, start, length in layout:
        span = slice(start, start + length)
        held = torch.cat([keys[span].detach(), fresh]).float()
        added = held.new_zeros(len(held))
        if bias is not None:
            added[:length] = bias[span]
        total = held.new_zeros(len(held))
        for first in range(0, query_len, CHUNK):
            some = group[:, first : first + CHUNK].float()
            seen = length + torch.arange(first, first + some.shape[1], device=held.device)
            hidden = torch.arange(len(held), device=held.device) > seen[:, None]
            logits = some @ held.T * scaling + added
            total += logits.masked_fill(hidden, -torch.inf).softmax(-1).sum((0, 1))
        heads.append(total)
    return torch.cat(heads)


def _limits(lengths: Int64[Tensor, " K"], query_len: int) -> Int64[Tensor, "K Q"]:
    """Entries that each query sees: the stored ones, and new ones up to its own."""
    return lengths[:, None] + torch.arange(1, query_len + 1)
