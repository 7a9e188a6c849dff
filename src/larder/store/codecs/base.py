"""Contract of storage codecs, the layers that a codec may code jointly, and the affine codec."""

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
from larder.core.family import Family
from larder.ops.quantization import (
    check_range,
    dequantize,
    pack_codes,
    quantize,
    scales_and_offsets,
    unpack_codes,
)

if TYPE_CHECKING:
    from larder.cache.sequence import SequenceCache

CODECS = Family("codec", "larder.store.codecs")
GROUP = 64  # tokens, or channels, that share an offset and a scale


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


class AffineCodec(StorageCodec):
    """Affine quantization to codes of a fixed number of bits, as `ops.quantization` does it.

    Keys share an offset and a scale per channel among the tokens of a group, values among the
    channels of a token: Zirui Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV
    Cache" (2024), arXiv:2402.02750, section 3.1.
    """

    bits: ClassVar[int]

    def encode(self, numbers: Float[Tensor, "T D"], rows: RowLayout) -> dict[str, Tensor]:
        check_range(numbers)
        exact = numbers.float()
        lows, highs = (_over_groups(exact, rows, side) for side in ("amin", "amax"))
        offsets, scales = scales_and_offsets(lows, highs, self.bits)
        codes = quantize(
            exact, _repeat_groups(offsets, rows), _repeat_groups(scales, rows), self.bits
        )
        return {"codes": pack_codes(codes, self.bits), "offsets": offsets, "scales": scales}

    def decode(self, coded: Mapping[str, Tensor], rows: RowLayout) -> Float[Tensor, "T D"]:
        codes = unpack_codes(coded["codes"], self.bits, rows.head_dim)
        offsets, scales = (_repeat_groups(coded[name], rows) for name in ("offsets", "scales"))
        if not codes.shape == offsets.shape == scales.shape:
            raise Damaged(
                f"Codes of the shape {tuple(codes.shape)} have offsets of {tuple(offsets.shape)}."
            )
        return dequantize(codes, offsets, scales)


def _over_groups(numbers: Float[Tensor, "T D"], rows: RowLayout, side: str) -> Float[Tensor, "N W"]:
    """Minimum or maximum of each group."""
    if rows.role is TensorRole.VALUES:
        groups = [getattr(group, side)(1) for group in numbers.split(GROUP, 1)]
        return torch.stack(groups, 1)
    groups = [
        getattr(group, side)(0)
        for head in rows.heads()
        for group in numbers[head].split(GROUP)
        if len(group)
    ]
    return torch.stack(groups) if groups else numbers.new_empty(0, rows.head_dim)


def _repeat_groups(shared: Float[Tensor, "N W"], rows: RowLayout) -> Float[Tensor, "T D"]:
    """Per-group values repeated for every number."""
    if rows.role is TensorRole.VALUES:
        return shared.repeat_interleave(GROUP, 1)[:, : rows.head_dim]
    counts = [
        min(GROUP, length - start) for length in rows.lengths for start in range(0, length, GROUP)
    ]
    return shared.repeat_interleave(torch.tensor(counts, dtype=torch.int64), 0)
