"""Attention of a block of new tokens: to the entries of a cache, and causally among themselves.

Beside it, the sum of the weights that each entry receives, which scores by accumulated attention
are made of: over all queries of the block and the query heads that share a kv head. The CPU kernel
in `larder.ops.cpu.block_attention` computes both in one pass over the logits. Without it, torch
attends, and sums come from a second pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.ops.attention import causal_attention, merge_attention, needs_gradient, ragged_attention
from larder.ops.cpu import flash_attention
from larder.ops.cpu.block_attention import BlockWork, supports
from larder.ops.cpu.kernel_choice import saved_choice, slowdown, thread_seconds

CHUNK = 64  # queries whose weights are in memory at a time, where torch sums them
FEWEST_QUERIES = 32  # of a block; for fewer, packing keys costs more than it saves
TIMED_HEADS, TIMED_QUERIES, TIMED_ENTRIES = 4, 128, 512


@dataclass(frozen=True)
class BlockAttention:
    """Attention of one block, called alone or in one call with other segments of a pass.

    Args:
        starts, lengths: rows of each kv head in the flat storage; int64 in host memory.
        scaling: of the logits.
        bias: as in `ragged_attention`, of the stored rows.
        sums: output buffer for the sum of the weights of each entry, head by head, the new tokens
            behind the stored entries; None for none.
    """

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
        """Output and log-sum-exp, in float32."""
        if self.can_join:
            return BlockWork(self).run()
        if self.sums is not None and self._is_supported:
            BlockWork(self, attends=False).run()
        elif self.sums is not None:
            self.sums.copy_(summed_weights(self))
        return self._attend_by_torch()

    @property
    def can_join(self) -> bool:
        """True if `BlockWork` serves it: where the kernel is supported, and faster than torch."""
        return self._is_supported and is_faster(self.keys.dtype, self.keys.shape[1])

    @property
    def _is_supported(self) -> bool:
        sides = self.queries, self.keys, self.values
        return supports(*sides) and not needs_gradient(*sides, self.new_keys, self.new_values)

    def _attend_by_torch(self) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
        queries, query_len = self.queries, self.queries.shape[1]
        new = self.new_keys, self.new_values
        parts = [causal_attention(queries, *new, self.scaling, (query_len,))]
        if self.lengths.any():
            rows = self.keys, self.values, self.starts, self.lengths
            parts.insert(0, ragged_attention(queries, *rows, self.scaling, self.bias))
        return merge_attention([out for out, _ in parts], [lse for _, lse in parts])


@cache
def is_faster(dtype: torch.dtype, head_dim: int) -> bool:
    """True if the kernel attends faster than torch does; measured once per machine.

    With matrix units (AMX), torch may be the faster one.
    """
    name = f"blocks of {str(dtype).removeprefix('torch.')}, heads of {head_dim}"
    return bool(saved_choice(name, partial(_measure, dtype, head_dim), 1))


def _measure(dtype: torch.dtype, head_dim: int) -> int:
    """1 if the kernel is faster."""
    queries = torch.ones(TIMED_HEADS, TIMED_QUERIES, head_dim, dtype=dtype)
    stored = torch.ones(TIMED_ENTRIES, head_dim, dtype=dtype)
    new = torch.ones(1, TIMED_QUERIES, head_dim, dtype=dtype)
    layout = torch.tensor([0]), torch.tensor([TIMED_ENTRIES])
    if not flash_attention.supports(queries, stored, stored):
        return 1
    block = BlockAttention(queries, stored, stored, *layout, new, new, 1.0)

    def ours() -> None:
        BlockWork(block).run()

    def torchs() -> None:
        flash_attention.ragged(queries, stored, stored, *layout, 1.0)
        flash_attention.causal(queries, new, new, 1.0, (TIMED_QUERIES,), None)

    return int(slowdown(partial(thread_seconds, ours), partial(thread_seconds, torchs)) < 1)


def summed_weights(block: BlockAttention) -> Float[Tensor, " T"]:
    """The `sums` of a block by torch, without gradient."""
    query_len, lengths = block.queries.shape[1], block.lengths.tolist()
    heads: list[Tensor] = []
    groups = block.queries.detach().unflatten(0, (len(lengths), -1))  # [K, R, Q, D]
    layout = zip(groups, block.new_keys.detach(), block.starts.tolist(), lengths, strict=True)
    for group, fresh, start, length in layout:
        span = slice(start, start + length)
        held = torch.cat([block.keys[span].detach(), fresh]).float()
        added = held.new_zeros(len(held))
        if block.bias is not None:
            added[:length] = block.bias[span]
        total = held.new_zeros(len(held))
        for first in range(0, query_len, CHUNK):
            some = group[:, first : first + CHUNK].float()
            seen = length + torch.arange(first, first + some.shape[1], device=held.device)
            hidden = torch.arange(len(held), device=held.device) > seen[:, None]
            logits = some @ held.T * block.scaling + added
            total += logits.masked_fill(hidden, -torch.inf).softmax(-1).sum((0, 1))
        heads.append(total)
    return torch.cat(heads)
