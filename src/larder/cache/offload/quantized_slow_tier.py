"""Quantized slow tier: whole groups of a head's entries as codes, and a residual window.

    entry    0 .. g-1    g .. 2g-1    2g .. 2g+w-1
    of head  a group     a group      w < g wait in the residual window

An entry keeps its number, so entry n is in group n // g of its head. Groups of all heads come in
order of arrival, in pieces that are merged as they grow, so that each is copied a few times and not
at every step. Dequantized are: rows that are moved, chunks that several queries attend to, and all
keys of a layer for an index that reads keys during the search. All readers see the quantized
numbers, the index too. If entries are removed from the middle, later entries are quantized again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.cache.forms.base import AttentionCall
from larder.cache.offload.slow_tier import MAX_ROWS, OffloadBatch, SlowTier
from larder.cache.quantized_tier import EncodingBatch, encode_tier
from larder.cache.spec import with_prefix
from larder.core.codec import Codec
from larder.core.observation import Entries
from larder.core.spec import LayerSpec
from larder.core.types import Queries
from larder.ops.attention import ragged_attention
from larder.ops.packing import packed_rows, starts_of
from larder.ops.quantization import QuantizedRows
from larder.ops.quantized_attention import KVSide, QuantizedKV, quantized_attention

DECODE_CHUNK = 1 << 12  # entries dequantized at once


class DequantizedEntries(Entries):
    """Entries whose `keys` and `values` are dequantized on first access.

    Args:
        entries: positions, columns and layout.
        dtype: of dequantized keys and values.
        numbers: quantized keys and values.
    """

    def __init__(self, entries: Entries, dtype: torch.dtype, numbers: QuantizedEntries) -> None:
        own = {"positions", "starts", "lengths", "columns", "scalars", "rope_positions", "grades"}
        for name in own:
            object.__setattr__(self, name, getattr(entries, name))
        object.__setattr__(self, "_dtype", dtype)
        object.__setattr__(self, "_numbers", numbers)

    _dtype: torch.dtype
    _numbers: QuantizedEntries

    @cached_property
    def keys(self) -> Float[Tensor, "C D"]:
        return self._everything(KVSide.KEYS)

    @cached_property
    def values(self) -> Float[Tensor, "C D"]:
        return self._everything(KVSide.VALUES)

    def keys_from(self, head: int, first: int) -> Float[Tensor, "S D"]:
        return self._of(head, first, KVSide.KEYS)

    def values_from(self, head: int, first: int) -> Float[Tensor, "S D"]:
        return self._of(head, first, KVSide.VALUES)

    def head_keys(self, head: int) -> Float[Tensor, "S D"]:
        return self._of(head, 0, KVSide.KEYS)

    def head_values(self, head: int) -> Float[Tensor, "S D"]:
        return self._of(head, 0, KVSide.VALUES)

    def gather(
        self, rows: Int64[Tensor, " M"], keys: Float[Tensor, "M D"], values: Float[Tensor, "M D"]
    ) -> None:
        starts = torch.tensor(self.starts)
        heads = torch.searchsorted(starts, rows, right=True) - 1
        keys.copy_(self._numbers.decoded(heads, rows - starts[heads], KVSide.KEYS))
        values.copy_(self._numbers.decoded(heads, rows - starts[heads], KVSide.VALUES))

    def page_versions(
        self, versions: Int64[Tensor, "N P"], members: Int64[Tensor, "N P S"]
    ) -> Int64[Tensor, "N P"]:
        """Page versions that also change when more entries of a page become quantized."""
        coded = self._numbers.coded
        sets = coded.repeat_interleave(len(members) // len(coded))[:, None, None]
        counts = ((members >= 0) & (members < sets)).sum(-1)
        return versions * (members.shape[2] + 1) + counts

    def _of(self, head: int, first: int, side: KVSide) -> Float[Tensor, "S D"]:
        members = torch.arange(first, self.lengths[head])
        heads = torch.full_like(members, head)
        pairs = zip(heads.split(DECODE_CHUNK), members.split(DECODE_CHUNK), strict=True)
        parts = [self._numbers.decoded(rows, some, side).to(self._dtype) for rows, some in pairs]
        return torch.cat(parts)

    def _everything(self, side: KVSide) -> Float[Tensor, "C D"]:
        parts = [self._of(head, 0, side) for head in range(len(self.lengths))]
        whole = parts[0].new_zeros(len(self.positions), parts[0].shape[1])
        for head, part in enumerate(parts):
            whole[self.rows(head)] = part
        return whole


MERGE_RATIO = 2  # a piece is merged with the one before if that is at most so many times as long
CODED = "coded."
KeysAndValues = tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]


@dataclass(frozen=True)
class QuantizedEntries:
    """Keys and values of all heads, immutable: a change makes a new object.

    Args:
        pieces: groups of `group` entries each, in order of arrival.
        waiting: residual window of each head: keys and values that fill no group yet.
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
        """Quantized entries of each head."""
        return torch.tensor([len(group) * self.group for group in self.groups])

    def decoded(
        self, heads: Int64[Tensor, " N"], members: Int64[Tensor, " N"], side: KVSide
    ) -> Float[Tensor, "N D"]:
        """Float32 keys or values of some entries, by head and number."""
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
        """All tensors."""
        sides = [side for piece in self.pieces for side in (piece.keys, piece.values)]
        codes = [tensor for side in sides for tensor in side.tensors().values()]
        lengths = [piece.lengths for piece in self.pieces]
        return *codes, *lengths, *(n for pair in self.waiting for n in pair), *self.groups


class QuantizedSlowTier(SlowTier):
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
        self._numbers = QuantizedEntries.of(codec.group, (), ((nothing, nothing),) * layer.kv_heads)
        self._former, self._whole, self._codec = self._numbers, layer, codec
        super().__init__(replace(layer, head_dim=0), dtype, columns, is_pinned)

    def add(self, batch: OffloadBatch, index_bytes: int = 0) -> None:
        numbers = self._with(batch)
        itemsize = self._keys.itemsize
        each = self._codec.bytes_per_entry(self._whole.head_dim, itemsize)
        none = {"keys": batch.keys[:, :0], "values": batch.values[:, :0]}
        super().add(replace(batch, **none), index_bytes + int(each * len(batch.keys)))
        self._former, self._numbers = self._numbers, numbers
        self._count_bytes()

    def undo_add(self, lengths: Int64[Tensor, " K"]) -> None:
        super().undo_add(lengths)
        self._numbers = self._former
        self._count_bytes()

    def entries(self) -> Entries:
        return DequantizedEntries(super().entries(), self._keys.dtype, self._numbers)

    def attention_calls(self, queries: Queries) -> Iterator[AttentionCall]:
        layer = self._whole
        for piece in self._numbers.pieces:
            if queries.device.type == "cpu":
                sizes = layer.kv_heads, layer.scaling
                yield partial(quantized_attention, queries, piece, *sizes, softcap=layer.softcap)
            else:
                yield from _calls_on_device(queries, piece, layer)
        lengths = torch.tensor([len(keys) for keys, _ in self._numbers.waiting])
        if int(lengths.sum()):
            sides = zip(*self._numbers.waiting, strict=True)
            keys, values = (torch.cat(side).to(queries.device) for side in sides)
            layout = starts_of(lengths), lengths, layer.scaling
            call = partial(ragged_attention, queries, keys, values, *layout)
            yield partial(call, softcap=layer.softcap)

    def without_range(self, start: int, stop: int | None = None) -> SlowTier | None:
        stays = self._staying(start, stop)
        if bool(stays.all()):
            return None
        held, rest = self.entries(), self._like()
        rest.room = self.room
        rows = packed_rows(self._starts, self._lengths)[stays]
        heads = torch.repeat_interleave(torch.arange(len(self._lengths)), self._lengths)[stays]
        members = rows - self._starts[heads]
        keys, values = (self._numbers.decoded(heads, members, side) for side in KVSide)
        lengths = torch.bincount(heads, minlength=len(self._lengths))
        columns = self._columns[:, rows]
        rest.add(OffloadBatch(keys, values, held.positions[rows], columns, lengths))
        return rest

    def fork(self) -> SlowTier:
        copy = super().fork()
        assert isinstance(copy, QuantizedSlowTier)
        copy._numbers = self._numbers
        copy._count_bytes()
        return copy

    def state(self) -> dict[str, Tensor]:
        numbers, state = self._numbers, super().state()
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

    def own_tensors(self) -> tuple[Tensor, ...]:
        return *super().own_tensors(), *self._numbers.tensors()

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
        """All entries after a batch was added.

        Raises:
            CacheError: a number to quantize exceeds float16.
        """
        counts, group = batch.lengths.tolist(), self._codec.group
        coming = [
            side.to("cpu", self._keys.dtype).split(counts) for side in (batch.keys, batch.values)
        ]
        ready: list[KeysAndValues] = []
        waiting: list[KeysAndValues] = []
        for held, keys, values in zip(self._numbers.waiting, *coming, strict=True):
            both = torch.cat([held[0], keys]), torch.cat([held[1], values])
            full = len(both[0]) // group * group
            ready.append((both[0][:full], both[1][:full]))
            waiting.append((both[0][full:].clone(), both[1][full:].clone()))
        pieces = list(self._numbers.pieces)
        if any(len(keys) for keys, _ in ready):
            pieces.append(self._encoded(ready))
        while len(pieces) > 1 and len(pieces[-2]) <= MERGE_RATIO * len(pieces[-1]):
            pieces[-2:] = [QuantizedKV.concat(pieces[-2:])]
        return QuantizedEntries.of(group, tuple(pieces), tuple(waiting))

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
