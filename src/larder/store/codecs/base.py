"""Contract of storage codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.family import Family

CODECS = Family("codec", "larder.store.codecs")


class TensorRole(Enum):
    """Role of a coded tensor: keys have per-channel ranges, values do not."""

    KEYS = "keys"
    VALUES = "values"


@dataclass(frozen=True)
class RowLayout:
    """Row layout of a layer, known before decoding.

    Args:
        lengths: rows of each kv head, which lie one head behind the other.
        head_dim: D.
        depth: of the layer, from 0 for the first to 1 for the last.
        role: keys or values.
    """

    lengths: tuple[int, ...]
    head_dim: int
    depth: float
    role: TensorRole

    def heads(self) -> list[slice]:
        """Row range of each head."""
        stops = torch.tensor(self.lengths).cumsum(0).tolist()
        return [slice(stop - n, stop) for stop, n in zip(stops, self.lengths, strict=True)]


class StorageCodec(ABC):
    """Stateless codec of the keys or values of a layer."""

    lossless: ClassVar[bool] = False

    @abstractmethod
    def encode(self, numbers: Float[Tensor, "T D"], rows: RowLayout) -> dict[str, Tensor]:
        """Encode numbers as named tensors.

        Raises:
            CacheError: numbers are not finite, or too large to be rounded.
        """

    @abstractmethod
    def decode(self, coded: Mapping[str, Tensor], rows: RowLayout) -> Float[Tensor, "T D"]:
        """Decode numbers, in float32 unless they were stored unchanged.

        Raises:
            Damaged: the codes are not what was written.
            KeyError, RuntimeError, ValueError, IndexError: they do not fit `rows`.
        """


def codec_named(name: str) -> StorageCodec:
    """Codec by name.

    Raises:
        UnknownName: there is none; the message lists those there are.
    """
    return CODECS.load(name)()
