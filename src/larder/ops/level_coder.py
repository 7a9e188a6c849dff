"""Coder of keys and values by calibrated, unevenly spaced levels, with outliers apart (KVQuant).

Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization"
(2024), arXiv:2401.18079, sections 3.3 and 3.4. The numbers of keys are normalized by channel
beforehand, so that most lie in [-1, 1]. Those of a value are normalized here: the middle and half
the range of its numbers, outliers aside, are kept beside it.

    block    [key outliers | middles and ranges of values | codes of keys | codes of values
              | indices, numbers of key outliers | channels, numbers of value outliers]

Unlike there, a block holds at most its share of key outliers, the largest, and others take the
outermost level: bytes are bounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from numpy import ndarray

from larder.core.errors import CacheError
from larder.ops.quantization import FLOAT16_MAX, pack_codes, unpack_codes

COUNT_BYTES = 4  # number of key outliers
RANGE_BYTES = 4  # middle and half range of a value
KEY_OUTLIER_BYTES = 4  # place in the block, and number
VALUE_OUTLIER_BYTES = 3  # channel, and number
CACHE_ROUNDING = 2**-7  # of the largest number of a value: above that of bfloat16
MOST_NUMBERS = 1 << 16  # of the keys of a block, and channels squared

Numbers = Float[ndarray, "N D"]
Payload = UInt8[ndarray, " B"]


@dataclass(frozen=True)
class CodedRanges:
    """Ranges that values were coded with.

    Args:
        is_held: mask of the values that were; numbers of the others have no meaning.
        ranges: middle and half range of each value.
        channels: of its outliers, ascending.
    """

    is_held: Bool[ndarray, " N"]
    ranges: Float[ndarray, "N 2"]
    channels: Int[ndarray, "N C"]


class _BlockParts(NamedTuple):
    ranges: Float[ndarray, "N 2"]
    codes: tuple[UInt8[ndarray, "N B"], UInt8[ndarray, "N B"]]
    indices: Int[ndarray, " S"]
    outliers: Float[ndarray, " S"]
    channels: Int[ndarray, "N C"]
    apart: Float[ndarray, "N C"]


@dataclass(frozen=True)
class LevelCoder:
    """Coder of the entries of one head, block by block.

    Args:
        levels: of keys and of values, ascending.
        bits: of a code.
        outliers: most numbers of a block of keys, and of each value, that are kept apart.
    """

    levels: Float[ndarray, "2 M"]
    bits: int
    outliers: float

    def encoded(self, numbers: Float[ndarray, "N D2"], held: CodedRanges | None = None) -> Payload:
        """Payload of one block of entries.

        Args:
            held: ranges of entries that were coded before; they keep what they were rounded to.

        Raises:
            CacheError: a number is beyond the range of float16, or the block is too large.
        """
        _check(numbers)
        keys, values = np.split(numbers.astype(np.float32), 2, 1)
        indices = outer_indices(keys, int(self.outliers * keys.size))
        channels = outlier_channels(values, value_outliers(self.outliers, values.shape[1]))
        ranges = inner_ranges(values, channels)
        if held is not None:
            stays = self._is_rounded(values, held)[:, None]
            channels = np.where(stays, held.channels, channels)
            ranges = np.where(stays, held.ranges, ranges)
        apart = np.take_along_axis(values, channels, 1)
        parts = [
            np.array([len(indices)], np.int32),
            ranges,
            self._packed(nearest(keys, self.levels[0])),
            self._packed(nearest(_normalized(values, ranges), self.levels[1])),
            indices.astype(np.uint16),
            keys.reshape(-1)[indices].astype(np.float16),
            channels.astype(np.uint8),
            apart.astype(np.float16),
        ]
        return np.concatenate([np.frombuffer(part.tobytes(), np.uint8) for part in parts])

    def decoded(self, payload: Payload, count: int, width: int) -> Float[ndarray, "N D2"]:
        """Numbers of one block of `count` entries of `width` numbers, half of them of keys.

        Raises:
            CacheError: the payload is damaged.
        """
        parts, half = self._parts(payload, count, width), width // 2
        keys, inner = (
            own[self._codes(codes, half)]
            for own, codes in zip(self.levels.astype(np.float32), parts.codes, strict=True)
        )
        keys.reshape(-1)[parts.indices] = parts.outliers
        values = _restored(inner, parts.ranges)
        np.put_along_axis(values, parts.channels, parts.apart, 1)
        return np.concatenate([keys, values], 1)

    def ranges_of(self, payload: Payload, count: int, width: int) -> CodedRanges:
        """Ranges of the values of one block.

        Raises:
            CacheError: as of `decoded`.
        """
        parts = self._parts(payload, count, width)
        return CodedRanges(np.ones(count, bool), parts.ranges, parts.channels)

    def _parts(self, payload: Payload, count: int, width: int) -> _BlockParts:
        half, rest = width // 2, payload
        packed, few = packed_bytes(self.bits, half), value_outliers(self.outliers, half)
        entry = RANGE_BYTES + 2 * packed + VALUE_OUTLIER_BYTES * few
        most, left = divmod(len(payload) - COUNT_BYTES - entry * count, KEY_OUTLIER_BYTES)

        def take(dtype: type, *shape: int) -> ndarray:
            nonlocal rest
            size = math.prod(shape) * np.dtype(dtype).itemsize
            own, rest = rest[:size], rest[size:]
            return np.frombuffer(own.tobytes(), dtype).reshape(shape)

        if most < 0 or left or int(take(np.int32, 1)[0]) != most:
            raise _damaged(count)
        parts = _BlockParts(
            take(np.float16, count, 2),
            (take(np.uint8, count, packed), take(np.uint8, count, packed)),
            take(np.uint16, most).astype(np.int64),
            take(np.float16, most),
            take(np.uint8, count, few).astype(np.int64),
            take(np.float16, count, few),
        )
        if (parts.indices >= count * half).any() or (parts.channels >= half).any():
            raise _damaged(count)
        return parts

    def _is_rounded(self, values: Numbers, held: CodedRanges) -> Bool[ndarray, " N"]:
        """Mask of the values that lie on the levels of a held range, but for their outliers."""
        inner = nearest(_normalized(values, held.ranges), self.levels[1])
        rounded = _restored(self.levels[1].astype(np.float32)[inner], held.ranges)
        apart = np.take_along_axis(values, held.channels, 1)
        np.put_along_axis(rounded, held.channels, apart, 1)
        errors, sizes = np.abs(rounded - values).max(1), np.abs(values).max(1)
        return held.is_held & (errors <= CACHE_ROUNDING * sizes)

    def _packed(self, codes: UInt8[ndarray, "N D"]) -> UInt8[ndarray, "N B"]:
        return pack_codes(torch.from_numpy(codes), self.bits).numpy()

    def _codes(self, packed: UInt8[ndarray, "N B"], width: int) -> UInt8[ndarray, "N D"]:
        return unpack_codes(torch.from_numpy(packed.copy()), self.bits, width).numpy()


def packed_bytes(bits: int, count: int) -> int:
    """Bytes of the codes of `count` numbers of a key or value."""
    return len(pack_codes(torch.zeros(1, count, dtype=torch.uint8), bits)[0])


def bytes_per_entry(bits: int, outliers: float, head_dim: int) -> float:
    """Most bytes of the codes, ranges and outliers of an entry; those of a block left out."""
    packed, few = packed_bytes(bits, head_dim), value_outliers(outliers, head_dim)
    apart = KEY_OUTLIER_BYTES * outliers * head_dim + VALUE_OUTLIER_BYTES * few
    return 2 * packed + RANGE_BYTES + apart


def value_outliers(share: float, head_dim: int) -> int:
    """Numbers of each value that are kept apart."""
    return round(share * head_dim)


def nearest(numbers: Numbers, levels: Float[ndarray, " M"]) -> UInt8[ndarray, "N D"]:
    """Code of the level nearest to each number; the lower one in between."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, numbers).astype(np.uint8)


def outer_indices(numbers: Numbers, most: int) -> Int[ndarray, " S"]:
    """Indices, ascending, of the numbers beyond [-1, 1]; the largest where there are too many."""
    sizes = np.abs(numbers).reshape(-1)
    largest = np.argsort(-sizes, kind="stable")[:most]
    return np.sort(largest[sizes[largest] > 1])


def outlier_channels(values: Numbers, count: int) -> Int[ndarray, "N C"]:
    """Channels of each value whose numbers are farthest from its median, ascending."""
    distances = np.abs(values - np.median(values, 1, keepdims=True))
    return np.sort(np.argsort(-distances, 1, kind="stable")[:, :count], 1)


def inner_ranges(values: Numbers, channels: Int[ndarray, "N C"]) -> Float[ndarray, "N 2"]:
    """Middle and half the range of the numbers of each value, some channels left out."""
    inner = values.copy()
    np.put_along_axis(inner, channels, np.nan, 1)
    low, high = np.nanmin(inner, 1), np.nanmax(inner, 1)
    return np.stack([(high + low) / 2, (high - low) / 2], 1).astype(np.float16)


def _normalized(values: Numbers, ranges: Float[ndarray, "N 2"]) -> Numbers:
    middles, halves = ranges.astype(np.float32).T[..., None]
    return np.divide(values - middles, halves, out=np.zeros_like(values), where=halves > 0)


def _restored(inner: Numbers, ranges: Float[ndarray, "N 2"]) -> Numbers:
    middles, halves = ranges.astype(np.float32).T[..., None]
    return middles + halves * inner


def _damaged(count: int) -> CacheError:
    return CacheError(f"A block of {count} coded entries is damaged: build the cache again.")


def _check(numbers: Float[ndarray, "N D2"]) -> None:
    """Raise CacheError if a number is beyond the range of float16, or there are too many."""
    if numbers.size and not float(np.abs(numbers).max()) <= FLOAT16_MAX:
        raise CacheError(
            f"Numbers up to {np.abs(numbers).max():.3g} cannot be coded by levels, as outliers "
            f"are float16 and reach {FLOAT16_MAX:g}: keep such entries at full precision."
        )
    if numbers.size > 2 * MOST_NUMBERS or numbers.shape[1] ** 2 > 4 * MOST_NUMBERS:
        raise CacheError(
            f"A block of {numbers.shape[0]} entries of {numbers.shape[1]} numbers has too many to "
            f"code by levels: take blocks of {2 * MOST_NUMBERS // numbers.shape[1]} entries, and "
            "heads of up to 256 channels."
        )
