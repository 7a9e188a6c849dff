"""Contract of storage codecs, and the layers that a codec may code jointly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.errors import Damaged
from larder.core.registry import Family

if TYPE_CHECKING:
    from larder.cache.sequence import SequenceCache

CODECS = Family("codec", "larder.store.codecs")


class TensorRole(Enum):
    """Role of a coded tensor: keys have per-channel ranges, values do not."""

    KEYS = "keys"
    VALUES = "values"


@dataclass(frozen=True)
class RowLayout:
    """Row layout of a layer, known before decoding.

    Args:
        lengths: number of rows of each kv head, in order.
        head_dim: D.
        depth: place of the layer, from 0 for the first to 1 for the last.
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


@dataclass(frozen=True)
class LayerStack:
    """Keys and values of the layers of a cache whose heads all hold the same tokens.

    Args:
        sides: of each layer in order.
        positions: true positions of the tokens.
        model: fingerprint of the model.
    """

    sides: tuple[Mapping[TensorRole, Float[Tensor, "K S D"]], ...]
    positions: Int[Tensor, " S"]
    model: str


CodedTensors = Mapping[str, Tensor]  # by the name that a codec gives each


@dataclass(frozen=True)
class CodedStack:
    """Layers that were coded jointly.

    Args:
        sides: tensors of each side of each layer.
        note: what decoding needs beside them, JSON-compatible; empty if nothing was coded.
    """

    sides: tuple[Mapping[TensorRole, CodedTensors], ...] = ()
    note: Mapping[str, Any] = field(default_factory=dict[str, Any])


class StorageCodec(ABC):
    """Stateless codec of the keys or values of a layer, or of all layers jointly."""

    lossless: ClassVar[bool] = False
    spans_layers: ClassVar[bool] = False  # codes layers jointly, where it can
    # Codecs that each chunk of a lossless cache is stored with, finest first.
    levels: ClassVar[tuple[str, ...]] = ()
    unstreamed: ClassVar[str] = ""  # with levels: the codec of caches that are not cut into chunks
    has_own_form: ClassVar[bool] = False  # stores and restores some caches in another form

    def check_model(self, model: str) -> None:
        """Check that the codec can code caches of a model, by its fingerprint.

        Raises:
            CacheError: it lacks what it needs; the message names the command that makes it.
        """
        del model

    def stored_form(self, cache: SequenceCache) -> SequenceCache:
        """Cache in the form that it is stored and restored in: the same one, or, of a codec with
        `has_own_form`, a copy, for which two copies at full precision are made.
        """
        return cache

    def encode_stack(self, stack: LayerStack) -> CodedStack:
        """Encode layers jointly; a codec that does not, or not these, returns none.

        Raises:
            CacheError: as `encode`.
        """
        return CodedStack()

    def decode_stack(
        self, coded: CodedStack, positions: Int[Tensor, " S"], heads: Sequence[int]
    ) -> Iterator[dict[TensorRole, Float[Tensor, "K S D"]]]:
        """Decode layers that `encode_stack` has coded, one after the other.

        Args:
            heads: kv heads of each layer.

        Raises:
            Damaged, KeyError, RuntimeError, ValueError, IndexError: as `decode`.
        """
        raise Damaged("Layers are said to be coded jointly by a codec that does not do so.")

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
            Damaged: the codes are damaged.
            KeyError, RuntimeError, ValueError, IndexError: they do not fit `rows`.
        """


def codec_named(name: str) -> StorageCodec:
    """Codec by name.

    Raises:
        UnknownName: there is no such codec; the message lists all.
    """
    return CODECS.load(name)()
