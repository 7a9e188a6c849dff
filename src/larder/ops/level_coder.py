"""Coder of keys and values by calibrated, unevenly spaced levels, with outliers apart (KVQuant).

Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization"
(2024), arXiv:2401.18079, sections 3.3 and 3.4. The numbers of keys are normalized by channel
beforehand, so that most lie in [-1, 1]. Those of a value are normalized here: the middle and half
the range of its numbers, outliers aside, are kept beside it.

    block    [key outliers | middles and ranges of values | codes of keys | codes of values
              | places, numbers of key outliers | channels, numbers of value outliers]

Unlike there, a block holds at most its share of key outliers, the largest, and others take the
outermost level: bytes are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from numpy import ndarray

from larder.core.errors import CacheError
from larder.ops.quantization import FLOAT16_MAX, pack_codes, unpack_codes

COUNT_BYTES = 4  # number of key outliers
RANGE_BYTES = 4  # middle and half range of a value
KEY_OUTLIER_BYTES = 4  # place in the block, and number
VALUE_OUTLIER_BYTES = 3  # channel, and number
MOST_NUMBERS = 1 << 16  # of the keys of a block, and channels squared

Numbers = Float[ndarray, "N D"]
Payload = UInt8[ndarray, " B"]


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

    def encoded(self, numbers: Float[ndarray, "N D2"]) -> Payload:
        """Payload of one block of entries.

        Raises:
            CacheError: a number is beyond the range of float16, or the block is too large.
        """
        _check(numbers)
        keys, values = np.split(numbers.astype(np.float32), 2, 1)
        places = outer_places(keys, int(self.outliers * keys.size))
        channels = outlier_channels(values, value_outliers(self.outliers, values.shape[1]))
        ranges = inner_ranges(values, channels)
        middles, halves = ranges.astype(np.float32).T[..., None]
        inner = np.divide(values - middles, halves, out=np.zeros_like(values), where=halves > 0)
        codes = [nearest(side, own) for side, own in zip((keys, inner), self.levels, strict=True)]
        apart = np.take_along_axis(values, channels, 1)
        parts = [
            np.array([len(places)], np.int32),
            ranges,
            *(pack_codes(torch.from_numpy(own), self.bits).numpy() for own in codes),
            places.astype(np.uint16),
            keys.reshape(-1)[places].astype(np.float16),
            channels.astype(np.uint8),
            apart.astype(np.float16),
        ]
        return np.concatenate([np.frombuffer(part.tobytes(), np.uint8) for part in parts])

    def decoded(self, payload: Payload, count: int, width: int) -> Float[ndarray, "N D2"]:
        """Numbers of one block of `count` entries of `width` numbers, half of them of keys."""
        half, rest = width // 2, payload
        packed = len(pack_codes(torch.zeros(1, half, dtype=torch.uint8), self.bits)[0])
        few = value_outliers(self.outliers, half)

        def take(size: int, dtype: type, *shape: int) -> ndarray:
            nonlocal rest
            own, rest = rest[:size], rest[size:]
            return np.frombuffer(own.tobytes(), dtype).reshape(*shape)

        apart = int(take(COUNT_BYTES, np.int32, 1)[0])
        ranges = take(RANGE_BYTES * count, np.float16, count, 2).astype(np.float32)
        keys, inner = (
            own[self._codes(take(packed * count, np.uint8, count, packed), half)]
            for own in self.levels.astype(np.float32)
        )
        places = take(2 * apart, np.uint16, -1).astype(np.int64)
        keys.reshape(-1)[places] = take(2 * apart, np.float16, -1)
        channels = take(few * count, np.uint8, count, few).astype(np.int64)
        values = ranges[:, :1] + ranges[:, 1:] * inner
        np.put_along_axis(values, channels, take(2 * few * count, np.float16, count, few), 1)
        return np.concatenate([keys, values], 1)

    def _codes(self, packed: UInt8[ndarray, "N B"], width: int) -> UInt8[ndarray, "N D"]:
        return unpack_codes(torch.from_numpy(packed.copy()), self.bits, width).numpy()


def bytes_per_entry(bits: int, outliers: float, head_dim: int) -> float:
    """Most bytes of the codes, ranges and outliers of an entry; those of a block left out."""
    packed = len(pack_codes(torch.zeros(1, head_dim, dtype=torch.uint8), bits)[0])
    few = value_outliers(outliers, head_dim)
    apart = KEY_OUTLIER_BYTES * outliers * head_dim + VALUE_OUTLIER_BYTES * few
    return 2 * packed + RANGE_BYTES + apart


def value_outliers(share: float, head_dim: int) -> int:
    """Numbers of each value that are kept apart."""
    return round(share * head_dim)


def nearest(numbers: Numbers, levels: Float[ndarray, " M"]) -> UInt8[ndarray, "N D"]:
    """Code of the level nearest to each number; the lower one in between."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, numbers).astype(np.uint8)


def outer_places(numbers: Numbers, most: int) -> Int[ndarray, " S"]:
    """Places, ascending, of the numbers beyond [-1, 1]; the largest where there are too many."""
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


def _check(numbers: Float[ndarray, "N D2"]) -> None:
    """Raises: CacheError: a number is beyond the range of float16, or there are too many."""
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
