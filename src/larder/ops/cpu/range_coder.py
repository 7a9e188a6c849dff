"""Range coder of quantized transform components on a CPU: coding, decoding, and counts of bits.

The kernels are compiled from C (`c/transform_attention.c`). Where they were not, numba compiles
those of `larder.ops.cpu.range_coder_kernels`, which describes the words that both write and read.
"""

from __future__ import annotations

from ctypes import Structure, byref
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Float, Int, Int8, Int32, UInt8, UInt16
from numpy import ndarray

from larder.core.codec import LAST_TIER
from larder.ops.cpu.c_library import INTEGER, POINTER, CodeTables, c_library
from larder.ops.symbol_model import NUM_CLASSES, symbol_model

LANES = 32  # states of a block
FIRST_RAW = 41  # class c has (c - FIRST_RAW) // 4 raw bits
MOST_WORDS = 3  # of a symbol; an escape takes 44 bits

Numbers = Float[ndarray, "N W"]
Symbols = Int32[ndarray, "N W"]
Tiers = Int8[ndarray, " N"]
Classes = Int[ndarray, " W"]
Payload = UInt8[ndarray, " B"]


def count_bits(numbers: Numbers, tiers: Tiers, bases: Classes, step: float) -> float:
    """Bits of some entries, without coding them.

    Args:
        bases: class of each component in tier 0.
    """
    factors = ((1 / step) * 2.0 ** -np.arange(-LAST_TIER, LAST_TIER + 1)).astype(np.float32)
    library = c_library()
    if library is None:
        from larder.ops.cpu import range_coder_kernels as kernels  # compiles: only where needed

        model = symbol_model()
        return kernels.count_bits(numbers, factors, tiers, bases, model.costs, model.raw_bits)
    numbers, sizes = np.ascontiguousarray(numbers, np.float32), numbers.shape[::-1]
    call = _Call(bases, tiers)
    given = numbers.ctypes.data, call.tiers.ctypes.data, factors.ctypes.data
    return library.larder_coded_bits(call.encoding, call.bases.ctypes.data, *sizes, *given)


def encode(symbols: Symbols, tiers: Tiers, bases: Classes) -> Payload:
    """Words of a block of entries, as bytes."""
    words = np.empty(symbols.size * MOST_WORDS + len(tiers) + 2 * LANES, np.uint16)
    library = c_library()
    if library is None:
        from larder.ops.cpu import range_coder_kernels as kernels  # compiles: only where needed

        model = symbol_model()
        tables = model.starts, model.places, model.raw_bits
        count = kernels.encode(symbols, tiers, bases, *tables, words)
        return words[:count].copy().view(np.uint8)
    symbols, sizes = np.ascontiguousarray(symbols, np.int32), symbols.shape[::-1]
    call = _Call(bases, tiers)
    given = symbols.ctypes.data, call.tiers.ctypes.data, words.ctypes.data
    count = library.larder_encode_components(call.encoding, call.bases.ctypes.data, *sizes, *given)
    if count < 0:
        raise MemoryError("Coding a block of entries could not allocate its buffers.")
    return words[:count].copy().view(np.uint8)


def decode(payload: Payload, count: int, bases: Classes, step: float) -> tuple[Numbers, Tiers]:
    """Dequantized components and tiers of a block of `count` entries.

    Damaged words give other numbers; nothing outside of them is read.
    """
    components, tiers = np.empty((count, len(bases)), np.float32), np.empty(count, np.int8)
    library = c_library()
    if library is None:
        from larder.ops.cpu import range_coder_kernels as kernels  # compiles: only where needed

        model, words = symbol_model(), payload.copy().view(np.uint16)  # aligned
        words = np.pad(words, (0, max(2 * LANES - len(words), 0)))  # states are read unchecked
        tables = model.starts, model.slots, model.ranks, model.raw_bits
        kernels.decode(words, bases, *tables, step, components, tiers)
        return components, tiers
    payload, call = np.ascontiguousarray(payload), _Call(bases, tiers)
    made = components.ctypes.data, call.tiers.ctypes.data
    sizes = len(bases), count
    words = payload.ctypes.data, len(payload)
    if library.larder_decode_components(
        call.decoding, call.bases.ctypes.data, *sizes, *words, step, *made
    ):
        raise MemoryError("Decoding a block of entries could not allocate its buffers.")
    return components, call.tiers


class _Call:
    """Tables and arrays of a call, as the kernels read them."""

    def __init__(self, bases: Classes, tiers: Tiers) -> None:
        tables = packed_tables()
        self.encoding, self.decoding = byref(tables.encoding), byref(tables.decoding)
        self.bases = np.ascontiguousarray(bases, np.int32)
        self.tiers = np.ascontiguousarray(tiers, np.int8)


class EncodingTables(Structure):
    """`struct encoding_tables` of c/transform_attention.c."""

    _fields_ = [
        *((name, POINTER) for name in ("starts", "places", "costs")),
        *((name, INTEGER) for name in ("classes", "first_raw")),
    ]


@dataclass(frozen=True)
class PackedTables:
    """Code tables as the kernels read them.

    Args:
        rows: what `decoding` points to; `encoding` points to the symbol model.
    """

    rows: UInt16[ndarray, "C F B"]
    decoding: CodeTables
    encoding: EncodingTables


@cache
def packed_tables() -> PackedTables:
    """Tables of all classes, and of tiers behind them."""
    model = symbol_model()
    alias = model.alias
    parts = [alias.dividers[:, None], alias.frequencies, alias.shifts, alias.codes]
    rows = np.ascontiguousarray(np.concatenate(parts, 1))
    raw = np.maximum(np.arange(NUM_CLASSES) - FIRST_RAW, 0) // 4
    assert np.array_equal(raw, model.raw_bits)
    sizes = NUM_CLASSES, FIRST_RAW
    tables = (part.ctypes.data for part in (model.starts, model.places, model.costs))
    return PackedTables(rows, CodeTables(rows.ctypes.data, *sizes), EncodingTables(*tables, *sizes))
