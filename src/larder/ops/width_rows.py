"""Single entries of blocks of transform components in fixed widths (`larder.ops.transform_coder`).

Widths follow from the class of a component and the tier of its entry, so the bits of an entry are
found without reading those before it; exceptions are looked up in the list of its block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Int64, UInt8
from numpy import ndarray

from larder.core.codec import LAST_TIER
from larder.ops.symbol_model import CLASSES_PER_OCTAVE, NUM_CLASSES, symbol_model

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
