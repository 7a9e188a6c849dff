"""Attention over quantized entries, without dequantizing all of them at once.

Groups of entries are stored end to end; the groups of the kv heads may alternate in any order.
The CPU kernel in `larder.ops.cpu.quantized_attention` is used for a few queries, chunks of
dequantized entries for many and on other devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from larder.ops.attention import merge_attention, ragged_attention
from larder.ops.cpu import quantized_attention as fast
from larder.ops.packing import starts_of
from larder.ops.quantization import QuantizedRows, concat_rows

DECODE_CHUNK = 1 << 11  # entries dequantized at a time: 2 MiB of float32 keys and values, D = 128


class KVSide(Enum):
    """Keys or values of an entry, by their field name."""

    KEYS = "keys"
    VALUES = "values"


@dataclass(frozen=True)
class QuantizedKV:
    """Quantized keys and values.

    Args:
        lengths: kv head and number of entries of each group; in host memory.
    """

    keys: QuantizedRows
    values: QuantizedRows
    lengths: Int32[Tensor, "G 2"]

    def __len__(self) -> int:
        return int(self.lengths[:, 1].sum())

    @staticmethod
    def concat(parts: Sequence[QuantizedKV]) -> QuantizedKV:
        """Concatenation, group by group."""
        keys, values = (concat_rows([part.side(side) for part in parts]) for side in KVSide)
        return QuantizedKV(keys, values, torch.cat([part.lengths for part in parts]))

    def groups_of(self, rows: Int64[Tensor, " N"]) -> Int64[Tensor, " N"]:
        """Group of each row; in host memory."""
        return torch.searchsorted(self.lengths[:, 1].long().cumsum(0), rows, right=True)

    def side(self, side: KVSide) -> QuantizedRows:
        """Keys or values."""
        return self.keys if side is KVSide.KEYS else self.values

    def heads(self) -> Int64[Tensor, " T"]:
        """Kv head of each row; in host memory."""
        return torch.repeat_interleave(self.lengths[:, 0].long(), self.lengths[:, 1])

    def decoded(
        self, rows: Int64[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        """Keys and values of some distinct rows."""
        groups = self.groups_of(rows)
        return self.keys.decoded(rows, groups), self.values.decoded(rows, groups)


def quantized_attention(
    queries: Float[Tensor, "H Q D"],
    entries: QuantizedKV,
    num_kv_heads: int,
    scaling: float,
    bias: Float[Tensor, " T"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """`ragged_attention` over quantized entries, in float32."""
    if softcap is None and fast.supports(queries, entries.keys, entries.values, num_kv_heads):
        numbers = entries.keys, entries.values, entries.lengths
        return fast.quantized_attention(queries, *numbers, num_kv_heads, scaling, bias)
    starts = starts_of(entries.lengths[:, 1].long())
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for head, group in enumerate(queries.unflatten(0, (num_kv_heads, -1))):
        groups = (entries.lengths[:, 0] == head).nonzero().flatten()
        counts = entries.lengths[groups, 1].long()
        shift = torch.repeat_interleave(starts[groups] - starts_of(counts), counts)
        out = torch.zeros_like(group, dtype=torch.float32)
        lse = group.new_full(group.shape[:2], -torch.inf, dtype=torch.float32)
        for rows in (shift + torch.arange(len(shift))).split(DECODE_CHUNK):
            if len(rows):
                part = _attend_rows(group, entries, rows, scaling, bias, softcap)
                out, lse = merge_attention((out, part[0]), (lse, part[1]))
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _attend_rows(
    queries: Float[Tensor, "R Q D"],
    entries: QuantizedKV,
    rows: Int64[Tensor, " N"],
    scaling: float,
    bias: Float[Tensor, " T"] | None,
    softcap: float | None,
) -> tuple[Float[Tensor, "R Q D"], Float[Tensor, "R Q"]]:
    keys, values = (side.to(queries.dtype) for side in entries.decoded(rows))
    starts, lengths = torch.zeros(1, dtype=torch.int64), torch.tensor([len(rows)])
    added = None if bias is None else bias[rows.to(bias.device)]
    return ragged_attention(queries, keys, values, starts, lengths, scaling, added, softcap=softcap)
