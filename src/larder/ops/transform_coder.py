"""Coders of transform components: range coder, bit planes or fixed widths, any step.

A component c of an entry in tier t is the symbol round(c / (step 2^t)). All coders hold every
symbol, however large: the range coder behind an escape code, the others in lists of exceptions.

    entropy   words of the range coder, tiers among them
    planes    as in `larder.ops.plane_coder`
    widths    [number of exceptions | tiers, 4 bits each | components | exceptions]

Widths follow from the class of a component and the tier of its entry, so that single entries are
read without those before them; exceptions are looked up in the list of their block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Int64, UInt8
from numpy import ndarray

from larder.core.codec import LAST_TIER, Coder
from larder.core.errors import CacheError
from larder.ops import plane_coder
from larder.ops.cpu.c_library import c_library
from larder.ops.symbol_model import (
    CLASSES_PER_OCTAVE,
    EXCEPTION_BITS,
    NUM_CLASSES,
    classes_of,
    symbol_model,
)

LARGEST_SYMBOL = 2**31 - 1
Numbers = Float[ndarray, "N W"]
Tiers = Int[ndarray, " N"]
Deviations = Float[ndarray, " W"]
Payload = UInt8[ndarray, " B"]
COUNT_BYTES = 4  # number of exceptions of a block
EXCEPTION_BYTES = 8  # index and symbol


@dataclass(frozen=True)
class WidthBlocks:
    """Blocks of `count` entries each.

    Args:
        payload: bytes of all blocks.
        starts, sizes: of each block in the payload.
        heads: row of `classes` of each block.
        classes: of each component in tier 0, by head.
    """

    payload: UInt8[ndarray, " P"]
    starts: Int64[ndarray, " M"]
    sizes: Int64[ndarray, " M"]
    heads: Int64[ndarray, " M"]
    count: int
    classes: Int[ndarray, "K W"]

    def rows(self, places: Int64[ndarray, " N"], step: float) -> Float[ndarray, "N W"]:
        """Dequantized components of some entries, entry e of block b at b * count + e."""
        wanted, back = np.unique(places, return_inverse=True)
        blocks, members = wanted // self.count, wanted % self.count
        widths, tiers = self._widths(), self._tiers()
        bits = widths.sum(2)[self.heads[:, None], tiers + LAST_TIER]
        firsts = (bits.cumsum(1) - bits)[blocks, members] + 8 * self._packed_starts()[blocks]
        own_tiers = tiers[blocks, members]
        own = widths[self.heads[blocks], own_tiers + LAST_TIER]
        symbols = self._symbols(firsts[:, None] + own.cumsum(1) - own, own)
        self._restore_exceptions(wanted, symbols)
        scales = (step * 2.0 ** own_tiers.astype(np.float64)).astype(np.float32)
        return (symbols.astype(np.float32) * scales[:, None])[back.reshape(-1)]

    def _widths(self) -> Int64[ndarray, "K T W"]:
        """Width of each component by head and tier."""
        tiers = np.arange(-LAST_TIER, LAST_TIER + 1)
        classes = self.classes[:, None].astype(np.int64) - CLASSES_PER_OCTAVE * tiers[None, :, None]
        return symbol_model().widths[classes.clip(0, NUM_CLASSES - 1)].astype(np.int64)

    def _tiers(self) -> Int64[ndarray, "M B"]:
        """Tier of each entry."""
        size = -(-self.count // 2)
        both = self.payload[self.starts[:, None] + COUNT_BYTES + np.arange(size)]
        nibbles = np.stack([both & 15, both >> 4], 2).reshape(len(both), -1)[:, : self.count]
        return nibbles.astype(np.int64).clip(0, 2 * LAST_TIER) - LAST_TIER

    def _packed_starts(self) -> Int64[ndarray, " M"]:
        """First byte of the components of each block."""
        return self.starts + COUNT_BYTES + -(-self.count // 2)

    def _symbols(
        self, firsts: Int64[ndarray, "N W"], widths: Int64[ndarray, "N W"]
    ) -> Int64[ndarray, "N W"]:
        """Symbols of some bits each, at most 8: two bytes hold them."""
        last = len(self.payload) - 1
        low = self.payload[np.minimum(firsts >> 3, last)].astype(np.int64)
        high = self.payload[np.minimum((firsts >> 3) + 1, last)].astype(np.int64)
        numbers = ((low | high << 8) >> (firsts & 7)) & ((1 << widths) - 1)
        reach = np.where(widths > 0, (1 << np.maximum(widths - 1, 0)) - 1, 0)
        return numbers - reach

    def _restore_exceptions(
        self, wanted: Int64[ndarray, " N"], symbols: Int64[ndarray, "N W"]
    ) -> None:
        """Write the symbols of `wanted` entries that are listed apart."""
        counted = self.payload[self.starts[:, None] + np.arange(COUNT_BYTES)]
        missed = counted.copy().view(np.int32)[:, 0].astype(np.int64)
        missed = missed.clip(0, (self.sizes - COUNT_BYTES) // EXCEPTION_BYTES)
        owners = np.repeat(np.arange(len(missed)), missed)
        turns = np.arange(len(owners)) - np.repeat(missed.cumsum() - missed, missed)
        heads = (self.starts + self.sizes - EXCEPTION_BYTES * missed)[owners] + 4 * turns
        sides = [
            self.payload[first[:, None] + np.arange(4)].copy().view(np.int32)[:, 0]
            for first in (heads, heads + 4 * missed[owners])
        ]
        indices, numbers = sides[0].astype(np.int64), sides[1]
        width = symbols.shape[1]
        keys = owners * self.count + indices // width
        asked = np.isin(keys, wanted)
        rows = np.searchsorted(wanted, keys[asked])
        symbols[rows, indices[asked] % width] = numbers[asked]


def quantized(numbers: Numbers, tiers: Tiers, step: float) -> Int[ndarray, "N W"]:
    """Symbols of components.

    Raises:
        CacheError: a symbol has more than 32 bits, or a component is not finite.
    """
    steps = step * 2.0 ** tiers.astype(np.float64)
    symbols = np.rint(numbers / steps[:, None])
    if symbols.size and not float(np.abs(symbols).max()) <= LARGEST_SYMBOL:
        raise CacheError(
            f"A component of {np.abs(numbers).max():.3g} cannot be coded with a step of "
            f"{steps.min():.3g}: keys and values must be finite, and the step larger."
        )
    return symbols.astype(np.int32)


def coded_bytes(
    numbers: Numbers, tiers: Tiers, deviations: Deviations, step: float, coder: Coder
) -> float:
    """Bytes of one block of entries, without coding it."""
    if coder is Coder.PLANES:
        return float(plane_coder.count_bytes(numbers, tiers, step))
    bases = classes_of(deviations, step)
    if coder is Coder.ENTROPY:
        from larder.ops.cpu import range_coder

        bits = range_coder.count_bits(numbers, tiers, bases, step)
        return _state_bytes(len(tiers)) + bits / 8
    symbols = quantized(numbers, tiers, step)
    widths = _widths(bases, tiers)
    reach = np.where(widths == 0, 0, 2 ** np.maximum(widths - 1, 0) - 1)
    missed = int((np.abs(symbols.astype(np.int64)) > reach).sum())
    return COUNT_BYTES + len(tiers) / 2 + (widths.sum() + missed * EXCEPTION_BITS) / 8


def encoded(
    numbers: Numbers, tiers: Tiers, deviations: Deviations, step: float, coder: Coder
) -> Payload:
    """Payload of one block of entries."""
    bases, symbols = classes_of(deviations, step), quantized(numbers, tiers, step)
    if coder is Coder.PLANES:
        return plane_coder.encode(symbols, tiers)
    if coder is Coder.WIDTHS:
        return _with_widths(symbols, tiers, bases)
    from larder.ops.cpu import range_coder

    return range_coder.encode(symbols, tiers, bases)


def decoded(
    payload: Payload, count: int, deviations: Deviations, step: float, coder: Coder
) -> tuple[Numbers, Tiers]:
    """Dequantized components and tiers of one block of `count` entries.

    Raises:
        CacheError: a block of fixed widths is damaged.
    """
    if coder is Coder.PLANES:
        return plane_coder.decode(payload, count, len(deviations), step)
    bases = classes_of(deviations, step)
    if coder is Coder.ENTROPY:
        from larder.ops.cpu import range_coder

        return range_coder.decode(payload, count, bases, step)
    from larder.ops.cpu import range_coder_kernels as kernels  # compiles: not before it is needed

    if not _is_whole(payload, count, bases):
        raise CacheError(f"A block of {count} coded entries is damaged: build the cache again.")
    numbers, tiers = np.empty((count, len(deviations)), np.float32), _saved_tiers(payload, count)
    first = 8 * (COUNT_BYTES + -(-count // 2))
    kernels.unpack_widths(payload, first, tiers, bases, symbol_model().widths, step, numbers)
    _restore_exceptions(payload, tiers, step, numbers)
    return numbers, tiers


def least_bytes(counts: Int[ndarray, " B"], width: int, coder: Coder) -> Int[ndarray, " B"]:
    """Fewest bytes that blocks of so many entries take."""
    if coder is Coder.ENTROPY:
        from larder.ops.cpu.range_coder import LANES

        return 4 * np.minimum(counts, LANES)
    if coder is Coder.PLANES:
        return plane_coder.least_bytes(counts, width)
    return np.ones_like(counts)


def is_whole(payload: Payload, count: int, width: int, coder: Coder) -> bool:
    """True if the bytes of a block may be those of `count` entries, where a coder can tell before
    it decodes them: that of bit planes.
    """
    return coder is not Coder.PLANES or plane_coder.is_whole(payload, count, width)


def decoded_rows(
    payload: Payload,
    starts: Int64[ndarray, " M"],
    sizes: Int64[ndarray, " M"],
    heads: Int64[ndarray, " M"],
    count: int,
    places: Int64[ndarray, " N"],
    deviations: Float[ndarray, "K W"],
    step: float,
    coder: Coder,
    read: int,
) -> Float[ndarray, "N R"]:
    """Dequantized components of some entries of blocks of `count` entries each, as of `decoded`.

    Args:
        starts, sizes: of each block in the payload.
        heads: row of `deviations` of each block.
        places: of the entries: entry e of block b is at b * count + e.
        read: components of each entry, from the first on.
    """
    if not len(places):
        return np.empty((0, read), np.float32)
    library = c_library()
    if coder is not Coder.WIDTHS and library is not None:
        from larder.ops.cpu.block_rows import BlockRows  # for recall alone

        own = payload, starts, sizes, heads, count, classes_of(deviations, step)
        return BlockRows(*own).read(library, places, step, coder, read)
    wanted, back = np.unique(places // count, return_inverse=True)
    back = back.reshape(-1) * count + places % count
    starts, sizes, heads = starts[wanted], sizes[wanted], heads[wanted]
    if coder is Coder.WIDTHS:
        bases = classes_of(deviations, step)
        rows = WidthBlocks(payload, starts, sizes, heads, count, bases).rows(back, step)
        return rows[:, :read]
    parts = list[Numbers]()
    for start, size, head in zip(starts, sizes, heads, strict=True):
        words = payload[start : start + size]
        parts.append(decoded(words, count, deviations[head], step, coder)[0])
    return np.concatenate(parts)[back, :read]


def _state_bytes(count: int) -> float:
    """Bytes of a block beside its bits; hardly ever too few.

    A lane's state takes 4 bytes, but holds 0 to 16 bits beyond those of an empty one.
    """
    from larder.ops.cpu.range_coder import LANES

    lanes = min(count, LANES)
    return 3 * lanes + 2 * lanes**0.5


def _widths(bases: Int[ndarray, " W"], tiers: Tiers) -> Int[ndarray, "N W"]:
    classes = bases[None] - CLASSES_PER_OCTAVE * tiers.astype(np.int64)[:, None]
    return symbol_model().widths[classes.clip(0, NUM_CLASSES - 1)].astype(np.int64)


def _with_widths(symbols: Int[ndarray, "N W"], tiers: Tiers, bases: Int[ndarray, " W"]) -> Payload:
    from larder.ops.cpu import range_coder_kernels as kernels  # compiles: not before it is needed

    total = int(_widths(bases, tiers).sum())
    packed = np.zeros(-(-total // 8), np.uint8)
    indices, numbers = np.empty(symbols.size, np.int32), np.empty(symbols.size, np.int32)
    missed = kernels.pack_widths(
        symbols, tiers, bases, symbol_model().widths, packed, indices, numbers
    )[1]
    offset = (tiers.astype(np.int16) + LAST_TIER).astype(np.uint8)
    nibbles = np.append(offset, np.uint8(0)) if len(tiers) % 2 else offset
    head = np.array([missed], np.int32).view(np.uint8)
    rare = np.concatenate([indices[:missed], numbers[:missed]]).view(np.uint8)
    return np.concatenate([head, nibbles[::2] | (nibbles[1::2] << 4), packed, rare])


def _is_whole(payload: Payload, count: int, bases: Int[ndarray, " W"]) -> bool:
    """True if a block of fixed widths has the bytes, tiers and exceptions of its entries."""
    head = COUNT_BYTES + -(-count // 2)
    if len(payload) < head or (tiers := _saved_tiers(payload, count)).max(initial=0) > LAST_TIER:
        return False
    packed = -(-int(_widths(bases, tiers).sum()) // 8)
    missed = np.frombuffer(payload[:COUNT_BYTES].tobytes(), np.int32)[0]
    if missed < 0 or len(payload) != head + packed + 8 * int(missed):
        return False
    indices = _exceptions(payload)[0]
    return bool(((indices >= 0) & (indices < count * len(bases))).all())


def _saved_tiers(payload: Payload, count: int) -> Tiers:
    nibbles = payload[COUNT_BYTES : COUNT_BYTES + -(-count // 2)]
    both = np.stack([nibbles & 15, nibbles >> 4], 1).reshape(-1)[:count]
    return (both.astype(np.int16) - LAST_TIER).astype(np.int8)


def _exceptions(payload: Payload) -> tuple[Int[ndarray, " M"], Int[ndarray, " M"]]:
    """Index and symbol of each exception."""
    missed = int(payload[:COUNT_BYTES].copy().view(np.int32)[0])
    rare = payload[len(payload) - 8 * missed :].copy().view(np.int32)
    return rare[:missed], rare[missed:]


def _restore_exceptions(payload: Payload, tiers: Tiers, step: float, numbers: Numbers) -> None:
    indices, symbols = _exceptions(payload)
    scales = step * 2.0 ** tiers.astype(np.float64)
    numbers.reshape(-1)[indices] = symbols * scales[indices // numbers.shape[1]]
