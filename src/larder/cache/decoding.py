"""Entries of a slow tier that are held in few bits, turned back as far as they are looked at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from functools import cached_property

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.observation import Entries

DECODE_CHUNK = 1 << 12  # entries turned back at once


class KVSide(Enum):
    """Of an entry."""

    KEYS = 0
    VALUES = 1


class EntryDecoder(ABC):
    """What turns entries back."""

    @property
    @abstractmethod
    def coded(self) -> Int64[Tensor, " K"]:
        """Entries of each head that are held in few bits."""

    @abstractmethod
    def decoded(
        self, heads: Int64[Tensor, " N"], members: Int64[Tensor, " N"], side: KVSide
    ) -> Float[Tensor, "N D"]:
        """Keys or values of some entries, by head and number, in float32."""


class DequantizedEntries(Entries):
    """As any entries; `keys` and `values` turn all of them back at the first look.

    Args:
        held: positions and columns, where they lie.
        dtype: of keys and values that are turned back.
    """

    def __init__(self, held: Entries, dtype: torch.dtype, numbers: EntryDecoder) -> None:
        own = {"positions", "starts", "lengths", "columns", "scalars", "places", "grades"}
        for name in own:
            object.__setattr__(self, name, getattr(held, name))
        object.__setattr__(self, "_dtype", dtype)
        object.__setattr__(self, "_numbers", numbers)

    _dtype: torch.dtype
    _numbers: EntryDecoder

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

    def stamped(
        self, versions: Int64[Tensor, "N P"], members: Int64[Tensor, "N P S"]
    ) -> Int64[Tensor, "N P"]:
        """A page is another one once more of its entries are held in few bits."""
        coded = self._numbers.coded
        sets = coded.repeat_interleave(len(members) // len(coded))[:, None, None]
        counts = ((members >= 0) & (members < sets)).sum(-1)
        return versions * (members.shape[2] + 1) + counts

    def _of(self, head: int, first: int, side: KVSide) -> Float[Tensor, "S D"]:
        members = torch.arange(first, self.lengths[head])
        heads = torch.full_like(members, head)
        pairs = zip(heads.split(DECODE_CHUNK), members.split(DECODE_CHUNK), strict=True)
        return torch.cat([self._numbers.decoded(*pair, side).to(self._dtype) for pair in pairs])

    def _everything(self, side: KVSide) -> Float[Tensor, "C D"]:
        parts = [self._of(head, 0, side) for head in range(len(self.lengths))]
        whole = parts[0].new_zeros(len(self.positions), parts[0].shape[1])
        for head, part in enumerate(parts):
            whole[self.rows(head)] = part
        return whole
