"""Quantized slow tier: blocks of `larder.cache.offload.coded_slow_tier` as quantized groups.

Groups of all heads come in order of arrival, in pieces that are merged as they grow, so that each
is copied a few times and not at every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from larder.cache.forms.base import AttentionCall
from larder.cache.offload.coded_slow_tier import (
    CodedNumbers,
    CodedSlowTier,
    KeysAndValues,
    split_ready,
)
from larder.cache.offload.slow_tier import MAX_ROWS, OffloadBatch, SlowTier
from larder.cache.quantized_tier import EncodingBatch, encode_tier
from larder.cache.spec import with_prefix
from larder.core.codec import Codec
from larder.core.spec import LayerSpec
from larder.core.types import Queries
from larder.ops.attention import ragged_attention
from larder.ops.packing import starts_of
from larder.ops.quantization import QuantizedRows
from larder.ops.quantized_attention import KVSide, QuantizedKV, quantized_attention

MERGE_RATIO = 2  # a piece is merged with the one before if that is at most so many times as long
CODED = "coded."


@dataclass(frozen=True)
class QuantizedEntries(CodedNumbers):
    """Quantized keys and values of all heads.

    Args:
        pieces: groups of `group` entries each, in order of arrival.
        waiting: residual window of each head.
        groups: of each head, the indices of its groups among all.
    """

    group: int
    pieces: tuple[QuantizedKV, ...]
    waiting: tuple[KeysAndValues, ...]
    groups: tuple[Int64[Tensor, " _"], ...]

    @staticmethod
    def of(
        group: int, pieces: tuple[QuantizedKV, ...], waiting: tuple[KeysAndValues, ...]
    ) -> QuantizedEntries:
        """Entries with the group indices of each head computed."""
        none = torch.empty(0, dtype=torch.int32)
        owners = torch.cat([none, *(piece.lengths[:, 0] for piece in pieces)])
        groups = tuple((owners == head).nonzero().flatten() for head in range(len(waiting)))
        return QuantizedEntries(group, pieces, waiting, groups)

    @property
    def coded(self) -> Int64[Tensor, " K"]:
        return torch.tensor([len(group) * self.group for group in self.groups])

    def decoded(
        self,
        heads: Int64[Tensor, " N"],
        members: Int64[Tensor, " N"],
        positions: Int[Tensor, " N"],
        side: KVSide,
    ) -> Float[Tensor, "N D"]:
        del positions
        found = torch.empty(len(heads), self.waiting[0][0].shape[1])
        coded = self.coded
        waits = members >= coded[heads]
        indices = torch.full_like(members, -1)
        for head, held in enumerate(self.waiting):
            own = (heads == head).nonzero().flatten()
            late, early = own[waits[own]], own[~waits[own]]
            found[late] = held[side is KVSide.VALUES][members[late] - coded[head]].float()
            groups = self.groups[head][members[early] // self.group]
            indices[early] = groups * self.group + members[early] % self.group
        first = 0
        for piece in self.pieces:
            own = ((indices >= first) & (indices < first + len(piece))).nonzero().flatten()
            if len(own):
                rows, back = torch.unique(indices[own] - first, return_inverse=True)
                found[own] = piece.side(side).decoded(rows, piece.groups_of(rows)).float()[back]
            first += len(piece)
        return found

    def tensors(self) -> tuple[Tensor, ...]:
        sides = [side for piece in self.pieces for side in (piece.keys, piece.values)]
        codes = [tensor for side in sides for tensor in side.tensors().values()]
        lengths = [piece.lengths for piece in self.pieces]
        return *codes, *lengths, *(n for pair in self.waiting for n in pair), *self.groups


class QuantizedSlowTier(CodedSlowTier):
    """Slow tier of one layer, quantized except for the residual window.

    Args:
        codec: quantization of the groups.
    """

    def __init__(
        self,
        layer: LayerSpec,
        dtype: torch.dtype,
        columns: tuple[str, ...],
        is_pinned: bool,
        codec: Codec,
    ) -> None:
        nothing = torch.empty(0, layer.head_dim, dtype=dtype)
        self._codec, waiting = codec, ((nothing, nothing),) * layer.kv_heads
        numbers = QuantizedEntries.of(codec.group, (), waiting)
        super().__init__(layer, dtype, columns, is_pinned, numbers)

    def attention_calls(self, queries: Queries) -> Iterator[AttentionCall]:
        layer = self._whole
        for piece in self._quantized.pieces:
            if queries.device.type == "cpu":
                sizes = layer.kv_heads, layer.scaling
                yield partial(quantized_attention, queries, piece, *sizes, softcap=layer.softcap)
            else:
                yield from _calls_on_device(queries, piece, layer)
        lengths = torch.tensor([len(keys) for keys, _ in self._quantized.waiting])
        if int(lengths.sum()):
            sides = zip(*self._quantized.waiting, strict=True)
            keys, values = (torch.cat(side).to(queries.device) for side in sides)
            layout = starts_of(lengths), lengths, layer.scaling
            call = partial(ragged_attention, queries, keys, values, *layout)
            yield partial(call, softcap=layer.softcap)

    def state(self) -> dict[str, Tensor]:
        numbers, state = self._quantized, super().state()
        state["keys"], state["values"] = map(torch.cat, zip(*numbers.waiting, strict=True))
        for piece in (QuantizedKV.concat(numbers.pieces),) if numbers.pieces else ():
            state[f"{CODED}lengths"] = piece.lengths.clone()
            for side, held in (("keys", piece.keys), ("values", piece.values)):
                tensors = held.tensors().items()
                state |= {f"{CODED}{side}.{name}": tensor.clone() for name, tensor in tensors}
        return state

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        none = state["keys"].new_empty(len(state["positions"]), 0)
        super().adopt({**state, "keys": none, "values": none.clone()})
        waits = (state["lengths"] % self._codec.group).tolist()
        keys, values = (state[side].split(waits) for side in ("keys", "values"))
        pieces = (self._saved(state),) if f"{CODED}lengths" in state else ()
        waiting = tuple(zip(keys, values, strict=True))
        self._numbers = self._former = QuantizedEntries.of(self._codec.group, pieces, waiting)
        self._count_bytes()

    @property
    def _quantized(self) -> QuantizedEntries:
        assert isinstance(self._numbers, QuantizedEntries)  # made by this class
        return self._numbers

    def _like(self) -> SlowTier:
        return QuantizedSlowTier(
            self._whole, self._keys.dtype, self._names, self._is_pinned, self._codec
        )

    def _saved(self, state: Mapping[str, Tensor]) -> QuantizedKV:
        """Quantized groups of a saved state."""
        size = self._whole.head_dim
        keys = QuantizedRows.adopt(self._codec.keys(size), with_prefix(f"{CODED}keys.", state))
        values = QuantizedRows.adopt(
            self._codec.values(size), with_prefix(f"{CODED}values.", state)
        )
        return QuantizedKV(keys, values, state[f"{CODED}lengths"])

    def _with(self, batch: OffloadBatch) -> QuantizedEntries:
        held, group, dtype = self._quantized, self._codec.group, self._keys.dtype
        ready, waiting = split_ready(held.waiting, batch, group, dtype)
        pieces = list(held.pieces)
        if any(len(keys) for keys, _ in ready):
            pieces.append(self._encoded(ready))
        while len(pieces) > 1 and len(pieces[-2]) <= MERGE_RATIO * len(pieces[-1]):
            pieces[-2:] = [QuantizedKV.concat(pieces[-2:])]
        return QuantizedEntries.of(group, tuple(pieces), waiting)

    def _coded_growth(self, batch: OffloadBatch, numbers: CodedNumbers) -> int:
        del numbers
        each = self._codec.bytes_per_entry(self._whole.head_dim, self._keys.itemsize)
        return int(each * len(batch.keys))

    def _encoded(self, ready: list[KeysAndValues]) -> QuantizedKV:
        """Quantized whole groups of each head."""
        lengths, group = torch.tensor([len(keys) for keys, _ in ready]), self._codec.group
        heads = torch.repeat_interleave(torch.arange(len(ready)), lengths)
        keys, values = (torch.cat(side).float() for side in zip(*ready, strict=True))
        pool = EncodingBatch(keys, values, torch.zeros(len(heads), dtype=torch.int32), heads)
        counts = torch.full((len(heads) // group,), group)
        return encode_tier(self._codec, pool, counts, torch.empty(0, 0), self._keys.dtype, 0).rows


def _calls_on_device(
    queries: Queries, piece: QuantizedKV, layer: LayerSpec
) -> Iterator[AttentionCall]:
    """Attention to codes that are dequantized and moved to the queries' device chunk by chunk."""
    heads = piece.heads()
    for rows in torch.arange(len(piece)).split(MAX_ROWS):
        order = rows[heads[rows].argsort(stable=True)]
        lengths = torch.bincount(heads[rows], minlength=layer.kv_heads)
        keys, values = (side.to(queries.device) for side in piece.decoded(order))
        layout = starts_of(lengths), lengths, layer.scaling
        yield partial(ragged_attention, queries, keys, values, *layout, softcap=layer.softcap)
