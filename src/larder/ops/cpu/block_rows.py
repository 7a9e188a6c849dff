"""Entries of blocks of transform components, decoded in C (`c/transform_attention.c`)."""

from __future__ import annotations

from ctypes import CDLL, Structure, byref, c_double
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Int64, UInt8
from numpy import ndarray

from larder.core.codec import Coder
from larder.ops.cpu.c_library import INTEGER, POINTER, CodeTables
from larder.ops.cpu.range_coder import packed_tables

CODERS = {Coder.ENTROPY: 0, Coder.PLANES: 1}  # `enum component_coder` of c/transform_attention.h


@dataclass(frozen=True)
class BlockRows:
    """Blocks of `count` entries each.

    Args:
        payload: bytes of all blocks.
        starts, sizes: of each block in the payload.
        heads: row of `bases` of each block.
        bases: class of each component in tier 0, by head.
    """

    payload: UInt8[ndarray, " P"]
    starts: Int64[ndarray, " M"]
    sizes: Int64[ndarray, " M"]
    heads: Int64[ndarray, " M"]
    count: int
    bases: Int[ndarray, "K W"]

    def read(
        self, library: CDLL, places: Int64[ndarray, " N"], step: float, coder: Coder, read: int
    ) -> Float[ndarray, "N R"]:
        """First `read` dequantized components of some entries, entry e of block b at b * count + e.

        Raises:
            IndexError: there is no such entry.
            MemoryError: buffers could not be allocated.
        """
        blocks, width = len(self.starts), self.bases.shape[1]
        if len(places) and not 0 <= places.min() <= places.max() < blocks * self.count:
            raise IndexError(f"An entry is in none of the {blocks} blocks.")
        found = np.empty((len(places), read), np.float32)
        bases = np.ascontiguousarray(self.bases, np.int32)
        given = self.heads, self.starts, self.sizes, self.payload, places
        own = [bases, *map(np.ascontiguousarray, given), found]
        sizes = width, read, self.count, blocks, len(places), CODERS[coder]
        pointers = (each.ctypes.data for each in own)
        call = BlockRowsCall(packed_tables().decoding, *pointers, *sizes, step)
        if library.larder_decode_rows(byref(call)):
            raise MemoryError("Decoding blocks of entries could not allocate its buffers.")
        return found


class BlockRowsCall(Structure):
    """`struct block_rows` of c/transform_attention.c."""

    _fields_ = [
        ("tables", CodeTables),
        *((name, POINTER) for name in ("bases", "heads", "starts", "sizes", "payload", "places")),
        ("components", POINTER),
        *((name, INTEGER) for name in ("width", "read", "count", "blocks", "rows", "coder")),
        ("step", c_double),
    ]
