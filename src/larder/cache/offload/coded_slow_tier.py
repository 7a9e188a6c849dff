"""Coded slow tier: whole blocks of a head's entries as codes, and a residual window.

    entry    0 .. b-1    b .. 2b-1    2b .. 2b+w-1
    of head  a block     a block      w < b wait in the residual window

An entry keeps its number, so entry n is in block n // b of its head. Decoded are: rows that are
moved, chunks that several queries attend to, and all keys of a layer for an index that reads keys
during the search. All readers see the decoded numbers, the index too. If entries are removed from
the middle, later entries are coded again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from larder.cache.forms.base import AttentionCall
from larder.cache.offload.slow_tier import OffloadBatch, SlowTier
from larder.core.observation import Entries
from larder.core.spec import LayerSpec
from larder.core.types import Queries
from larder.ops.quantized_attention import KVSide

DECODE_CHUNK = 1 << 12  # entries decoded at once
KeysAndValues = tuple[Float[Tensor, "_ _"], Float[Tensor, "_ _"]]


class CodedNumbers(ABC):
    """Keys and values of all heads, immutable: a change makes a new object.

    Attributes:
        waiting: residual window of each head: keys and values that fill no block yet.
    """

    waiting: tuple[KeysAndValues, ...]

    @property
    @abstractmethod
    def coded(self) -> Int64[Tensor, " K"]:
        """Coded entries of each head."""

    @abstractmethod
    def decoded(
        self,
        heads: Int64[Tensor, " N"],
        members: Int64[Tensor, " N"],
        positions: Int[Tensor, " N"],
        side: KVSide,
    ) -> Float[Tensor, "N D"]:
        """Float32 keys or values of some entries, by head and number.

        Args:
            positions: true positions of the entries.
        """

    def both(
        self,
        heads: Int64[Tensor, " N"],
        members: Int64[Tensor, " N"],
        positions: Int[Tensor, " N"],
    ) -> KeysAndValues:
        """Float32 keys and values of some entries, as `decoded` gives them."""
        keys, values = (self.decoded(heads, members, positions, side) for side in KVSide)
        return keys, values

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors."""


class DecodedEntries(Entries):
    """Entries whose `keys` and `values` are decoded on first access.

    Args:
        entries: positions, columns and layout.
        dtype: of decoded keys and values.
        numbers: coded keys and values.
    """

    def __init__(self, entries: Entries, dtype: torch.dtype, numbers: CodedNumbers) -> None:
        own = {"positions", "starts", "lengths", "columns", "scalars", "rope_positions", "grades"}
        for name in own:
            object.__setattr__(self, name, getattr(entries, name))
        object.__setattr__(self, "_dtype", dtype)
        object.__setattr__(self, "_numbers", numbers)

    is_coded = True
    _dtype: torch.dtype
    _numbers: CodedNumbers

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

    def keys_at(self, rows: Int64[Tensor, " M"]) -> Float[Tensor, "M D"]:
        return self._numbers.decoded(*self._owners(rows), KVSide.KEYS).to(self._dtype)

    def gather(
        self, rows: Int64[Tensor, " M"], keys: Float[Tensor, "M D"], values: Float[Tensor, "M D"]
    ) -> None:
        own, other = self._numbers.both(*self._owners(rows))
        keys.copy_(own)
        values.copy_(other)

    def page_versions(
        self, versions: Int64[Tensor, "N P"], members: Int64[Tensor, "N P S"]
    ) -> Int64[Tensor, "N P"]:
        """Page versions that also change when more entries of a page become coded."""
        coded = self._numbers.coded
        sets = coded.repeat_interleave(len(members) // len(coded))[:, None, None]
        counts = ((members >= 0) & (members < sets)).sum(-1)
        return versions * (members.shape[2] + 1) + counts

    def _owners(
        self, rows: Int64[Tensor, " M"]
    ) -> tuple[Int64[Tensor, " M"], Int64[Tensor, " M"], Int[Tensor, " M"]]:
        """Head, number and position of the entries in some storage rows."""
        starts = self.layout[0]
        heads = torch.searchsorted(starts, rows, right=True) - 1
        return heads, rows - starts[heads], self.positions[rows]

    def _of(self, head: int, first: int, side: KVSide) -> Float[Tensor, "S D"]:
        rows = torch.arange(first, self.lengths[head]) + self.starts[head]
        chunks = rows.split(DECODE_CHUNK)
        parts = [self._numbers.decoded(*self._owners(some), side) for some in chunks]
        return torch.cat([part.to(self._dtype) for part in parts])

    def _everything(self, side: KVSide) -> Float[Tensor, "C D"]:
        parts = [self._of(head, 0, side) for head in range(len(self.lengths))]
        whole = parts[0].new_zeros(len(self.positions), parts[0].shape[1])
        for head, part in enumerate(parts):
            whole[self.rows(head)] = part
        return whole


class CodedSlowTier(SlowTier):
    """Slow tier of one layer, coded except for the residual window.

    Args:
        numbers: coded keys and values, none yet.
    """

    def __init__(
        self,
        layer: LayerSpec,
        dtype: torch.dtype,
        columns: tuple[str, ...],
        is_pinned: bool,
        numbers: CodedNumbers,
    ) -> None:
        self._numbers, self._former, self._whole = numbers, numbers, layer
        super().__init__(replace(layer, head_dim=0), dtype, columns, is_pinned)

    @abstractmethod
    def _with(self, batch: OffloadBatch) -> CodedNumbers:
        """All entries after a batch was added.

        Raises:
            CacheError: a number cannot be coded.
        """

    @abstractmethod
    def _coded_growth(self, batch: OffloadBatch, numbers: CodedNumbers) -> int:
        """Bytes of codes that a batch adds, or an estimate.

        Args:
            numbers: all entries after the batch was added.
        """

    def add(self, batch: OffloadBatch, index_bytes: int = 0) -> None:
        numbers = self._with(batch)
        none = {"keys": batch.keys[:, :0], "values": batch.values[:, :0]}
        grown = self._coded_growth(batch, numbers)
        super().add(replace(batch, **none), index_bytes + grown)
        self._former, self._numbers = self._numbers, numbers
        self._count_bytes()

    def undo_add(self, lengths: Int64[Tensor, " K"]) -> None:
        super().undo_add(lengths)
        self._numbers = self._former
        self._count_bytes()

    def entries(self) -> Entries:
        return DecodedEntries(super().entries(), self._keys.dtype, self._numbers)

    def attention_calls(self, queries: Queries) -> Iterator[AttentionCall]:
        return self._chunk_calls(queries, self._whole)

    def _copy_into(self, other: SlowTier, chosen: Bool[Tensor, " T"]) -> None:
        """Code the packed entries of a mask again, behind those of another tier."""
        rows, heads = self._packed(chosen)
        positions = self._positions[rows]
        keys, values = self._numbers.both(heads, rows - self._starts[heads], positions)
        lengths = torch.bincount(heads, minlength=len(self._lengths))
        other.add(OffloadBatch(keys, values, positions, self._columns[:, rows], lengths))

    def fork(self) -> SlowTier:
        copy = super().fork()
        assert isinstance(copy, CodedSlowTier)
        copy._numbers = self._numbers
        copy._count_bytes()
        return copy

    def own_tensors(self) -> tuple[Tensor, ...]:
        return *super().own_tensors(), *self._numbers.tensors()


def split_ready(
    waiting: tuple[KeysAndValues, ...], batch: OffloadBatch, size: int, dtype: torch.dtype
) -> tuple[list[KeysAndValues], tuple[KeysAndValues, ...]]:
    """Entries of each head that fill whole blocks, and those that wait, once a batch was added.

    Args:
        waiting: entries of each head that waited before.
        size: entries of a block.
        dtype: of the entries.
    """
    counts = batch.lengths.tolist()
    coming = [side.to("cpu", dtype).split(counts) for side in (batch.keys, batch.values)]
    ready, rest = list[KeysAndValues](), list[KeysAndValues]()
    for held, keys, values in zip(waiting, *coming, strict=True):
        both = torch.cat([held[0], keys]), torch.cat([held[1], values])
        full = len(both[0]) // size * size
        ready.append((both[0][:full], both[1][:full]))
        rest.append((both[0][full:].clone(), both[1][full:].clone()))
    return ready, tuple(rest)
