"""Bit planes of quantized transform components: codes that take no arithmetic to read.

Entries of a block are in order of tiers, 64 rows a group. A plane is a bit of each row, so it fits
in a register, and masks move and blend the bytes of 64 symbols at once. Each component of a group
has one of 16 codes in the manner of R. F. Rice and J. R. Plaunt, "Adaptive Variable-Length Coding
for Efficient Compression of Spacecraft Television Data" (1971),
https://doi.org/10.1109/TCOM.1971.1090789: the one with the fewest bits. The `raw` lowest bits of a
magnitude are planes of their own. The rest, the quotient, is written in levels, up to `most`: a
plane of rows that reach 1, then a bit of each row that reached it for those that reach 2, and so
on. Signs are a bit of each row that is not 0. A sparse code has 8 bits in place of the first plane,
for the bytes of it that are not 0, and then these bytes. Signed codes have raw bits in two's
complement, of which the lowest number stands for all beyond; the magnitudes of these go on in
levels of 1, and they alone have signs, which are bits of positive numbers there. A number that its
code does not hold is listed apart, so nothing is ever clipped. Groups with many numbers that are no
bytes are wide: they have codes that hold any of 32 bits.

    block     tiers: of each 64 entries in order of position, three planes | groups
    group     bytes, with the highest bit where it is wide (4) | near and far numbers (2, 2)
              | codes, half a byte a component | near numbers | far numbers | planes | levels, signs
    near      row and component * 64 (2) | a byte
    far       row and component * 64 (2) | 4 bytes

Components are in order of their codes, up to four of one code at a time. Raw bits and first levels
come component by component, all planes of the group before all else; marks of bytes, levels and
signs of the four take turns, so that the place of one need not wait for that of another. A plane of
n rows takes n / 8 bytes, rounded up; what is behind the planes is not aligned. The lowest bit comes
first, and is the first row.

C reads and writes the same bytes (ops/cpu/c/plane_coder.c); what is here serves where it was not
compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL
from enum import Enum
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Int8, Int32, UInt8
from numpy import ndarray

from larder.core.codec import LAST_TIER
from larder.ops.cpu.c_library import c_library

ROWS = 64  # of a group
TIER_PLANES = 3
GROUP_HEAD = 8  # bytes
WIDE = 1 << 31
MOST_NEAR = 127
MOST_FAR = 32  # numbers of a group that are no bytes; with more it is wide
NEAR_BYTES, FAR_BYTES = 3, 6
TILE = 4  # most components of one code whose levels take turns
MOST_WIDTH = 1024  # components of an entry
AVX512 = 2  # of `enum instruction_set` of c_library.h

Symbols = Int32[ndarray, "N W"]
Tiers = Int8[ndarray, " N"]
Numbers = Float[ndarray, "N W"]
Codes = UInt8[ndarray, " W"]
Payload = UInt8[ndarray, " B"]


class Kind(Enum):
    """Representation of what the raw bits of a code leave.

    LEVELS: the quotient of the magnitude in levels, and signs of what is not 0.
    SPARSE: the same, the first level of the bytes of its plane that are not 0.
    SIGNED: raw bits are in two's complement; the lowest number stands for all beyond, whose
        magnitudes go on in levels of 1, with signs.
    """

    LEVELS = "levels"
    SPARSE = "sparse"
    SIGNED = "signed"


class PlaneCode(NamedTuple):
    """Code of the components of a group.

    Args:
        raw: bits that are planes.
        most: levels.
    """

    raw: int
    most: int
    kind: Kind = Kind.LEVELS

    @property
    def first(self) -> int:
        """Least magnitude that is written in levels."""
        return 1 << (self.raw - (self.kind is Kind.SIGNED))

    @property
    def step(self) -> int:
        """Magnitudes of a level."""
        return 1 if self.kind is Kind.SIGNED else self.first

    @property
    def largest(self) -> int:
        """Largest magnitude that the code holds."""
        return self.first + self.most * self.step - 1

    @property
    def planes(self) -> int:
        """Planes of a bit of each row."""
        return self.raw + (self.most > 0 and self.kind is Kind.LEVELS)

    def quotients(self, sizes: Int[ndarray, "N W"]) -> Int[ndarray, "N W"]:
        """Levels that magnitudes reach."""
        return np.maximum((sizes - self.first) // self.step + 1, 0)


NARROW_CODES = (
    PlaneCode(0, 0),
    PlaneCode(0, 1, Kind.SPARSE),
    PlaneCode(0, 1),
    PlaneCode(0, 2),
    PlaneCode(0, 3, Kind.SPARSE),
    PlaneCode(0, 7),
    *(PlaneCode(2, most, Kind.SIGNED) for most in (2, 3, 7)),
    *(PlaneCode(raw, 7, Kind.SIGNED) for raw in (3, 4)),
    *(PlaneCode(raw, 7) for raw in (1, 2, 3, 4)),
    PlaneCode(5, 3),
)
WIDE_CODES = tuple(PlaneCode(raw, 7) for raw in range(0, 32, 2))


def count_bytes(numbers: Numbers, tiers: Tiers, step: float) -> int:
    """Bytes of a block of entries, without coding it."""
    factors = ((1 / step) * 2.0 ** -np.arange(-LAST_TIER, LAST_TIER + 1)).astype(np.float32)
    if (library := plane_library()) is None:
        symbols = np.rint(numbers * factors[tiers.astype(np.int64) + LAST_TIER, None])
        return len(_encode(symbols.clip(-(2.0**31), 2.0**31 - 1).astype(np.int64), tiers))
    numbers, tiers = np.ascontiguousarray(numbers, np.float32), np.ascontiguousarray(tiers)
    given = numbers.ctypes.data, tiers.ctypes.data, factors.ctypes.data
    return _checked(library.larder_count_planes(*numbers.shape[::-1], *given))


def encode(symbols: Symbols, tiers: Tiers) -> Payload:
    """Bytes of a block of entries."""
    if (library := plane_library()) is None:
        return _encode(symbols.astype(np.int64), tiers)
    symbols, tiers = np.ascontiguousarray(symbols, np.int32), np.ascontiguousarray(tiers)
    count, width = symbols.shape
    head = GROUP_HEAD + width + TIER_PLANES * ROWS // 8
    most = FAR_BYTES * symbols.size + -(-count // ROWS) * (head + width * ROWS // 8)
    payload = np.empty(most, np.uint8)
    given = symbols.ctypes.data, tiers.ctypes.data, payload.ctypes.data
    return payload[: _checked(library.larder_encode_planes(width, count, *given))].copy()


def decode(payload: Payload, count: int, width: int, step: float) -> tuple[Numbers, Tiers]:
    """Dequantized components and tiers of a block of `count` entries.

    Damaged bytes give other numbers; nothing outside of them is read.
    """
    if (library := plane_library()) is None:
        symbols, tiers, _ = _decode(payload, count, width)
        scales = (step * 2.0 ** tiers.astype(np.float64)).astype(np.float32)
        return symbols.astype(np.float32) * scales[:, None], tiers
    payload = np.ascontiguousarray(payload)
    components, tiers = np.empty((count, width), np.float32), np.empty(count, np.int8)
    made = components.ctypes.data, tiers.ctypes.data
    given = payload.ctypes.data, len(payload), step
    if library.larder_decode_planes(width, count, *given, *made):
        raise MemoryError("Decoding a block of entries could not allocate its buffers.")
    return components, tiers


def is_whole(payload: Payload, count: int, width: int) -> bool:
    """True if the bytes are those of a block of `count` entries: each part ends where it should."""
    if (library := plane_library()) is None:
        return _decode(payload, count, width)[2]
    payload = np.ascontiguousarray(payload)
    return library.larder_planes_are_whole(width, count, payload.ctypes.data, len(payload)) == 1


def least_bytes(counts: Int[ndarray, " B"], width: int) -> Int[ndarray, " B"]:
    """Fewest bytes of blocks of so many entries."""
    groups, rest = np.divmod(counts, ROWS)
    tiers = TIER_PLANES * (groups * ROWS // 8 + -(-rest // 8))
    return tiers + (groups + (rest > 0)) * (GROUP_HEAD + -(-width // 2))


def component_bits(symbols: Symbols, tiers: Tiers) -> Int[ndarray, " W"]:
    """Bits of each component of a block of entries, without the half byte that names its code."""
    groups = [_chosen_codes(np.abs(group)) for group in _groups(symbols.astype(np.int64), tiers)]
    return np.asarray(sum((bits for _, _, bits in groups), np.zeros(symbols.shape[1], np.int64)))


def plane_library() -> CDLL | None:
    """The C kernels, or None where they were not compiled or are older than this coder."""
    library = c_library()
    return library if hasattr(library, "larder_encode_planes") else None


def is_plane_kernel_fast() -> bool:
    """True if the compiled kernel reads planes by masks, with AVX-512; other processors read
    them bit by bit, and a decode step takes more than twice as long."""
    library = plane_library()
    return library is not None and library.larder_instruction_set() >= AVX512


def _checked(size: int) -> int:
    if size < 0:
        raise MemoryError("Coding a block of entries could not allocate its buffers.")
    return size


def _encode(symbols: Int[ndarray, "N W"], tiers: Tiers) -> Payload:
    parts = [np.zeros(0, np.uint8)]
    for first in range(0, len(tiers), ROWS):
        raised = tiers[first : first + ROWS].astype(np.int64) + LAST_TIER
        parts += [_packed((raised >> plane & 1) == 1) for plane in range(TIER_PLANES)]
    return np.concatenate([*parts, *map(_group, _groups(symbols, tiers))])


def _groups(symbols: Int[ndarray, "N W"], tiers: Tiers) -> list[Int[ndarray, "M W"]]:
    """Entries in order of tiers, 64 rows a group."""
    ordered = symbols[np.argsort(tiers, kind="stable")]
    return [ordered[first : first + ROWS] for first in range(0, len(tiers), ROWS)]


def _chosen_codes(
    sizes: Int[ndarray, "N W"],
) -> tuple[tuple[PlaneCode, ...], Codes, Int[ndarray, " W"]]:
    """Table of codes of a group, the code of each component, and the bits that it spends."""
    is_wide = int((sizes > MOST_NEAR).sum()) > MOST_FAR
    table = WIDE_CODES if is_wide else NARROW_CODES
    bits = np.stack([_bits(sizes, code) for code in table])
    return table, np.argmin(bits, 0).astype(np.uint8), bits.min(0)


def _packed(bits: Bool[ndarray, " N"]) -> UInt8[ndarray, " B"]:
    return np.packbits(bits, bitorder="little")


def _group(symbols: Int[ndarray, "N W"]) -> Payload:
    """Bytes of a group."""
    sizes = np.abs(symbols)
    table, codes, _ = _chosen_codes(sizes)
    largest = np.array([table[code].largest for code in codes])
    beyond, far = sizes > largest, sizes > MOST_NEAR
    nears, fars = _listed(symbols, beyond & ~far, "i1"), _listed(symbols, beyond & far, "<i4")
    halves = np.append(codes, np.zeros(len(codes) % 2, np.uint8))
    fixed, rest = [np.zeros(0, np.uint8)], [np.zeros(0, bool)]
    held = np.where(beyond, 0, symbols)
    for code, tile in _tiles(codes):
        own, kind = held[:, tile], table[code].kind
        quotients = table[code].quotients(np.abs(own))
        levels = [quotients >= level for level in range(1, table[code].most + 1)]
        raws = np.abs(own)
        if kind is Kind.SIGNED:
            raws = np.where(quotients > 0, table[code].first, own)
        for place in range(len(tile)):
            bits = raws[:, place] >> np.arange(table[code].raw)[:, None] & 1
            fixed += [_packed(bit == 1) for bit in bits]
            fixed += [_packed(level[:, place]) for level in levels[:1] if kind is Kind.LEVELS]
        if kind is Kind.SPARSE:
            marks = _marked_bytes(sizes[:, tile])
            rest += [marks[:, place] for place in range(len(tile))]
            levels = [marks.repeat(8, 0)[: len(symbols)], *levels]
        for former, level in zip(levels, levels[1:], strict=False):
            rest += [level[former[:, place], place] for place in range(len(tile))]
        turned = own > 0 if kind is Kind.SIGNED else own < 0
        signed = quotients > 0 if kind is Kind.SIGNED else own != 0
        rest += [turned[signed[:, place], place] for place in range(len(tile))]
    body = [halves[::2] | halves[1::2] << 4, nears, fars, *fixed, _packed(np.concatenate(rest))]
    size = GROUP_HEAD + sum(len(part) for part in body)
    counts = np.array([len(nears) // NEAR_BYTES, len(fars) // FAR_BYTES], "<u2").view(np.uint8)
    head = np.array([size | (WIDE if table is WIDE_CODES else 0)], "<u4").view(np.uint8)
    return np.concatenate([head, counts, *body])


def _bits(sizes: Int[ndarray, "N W"], code: PlaneCode) -> Int[ndarray, " W"]:
    """Bits that a code spends on each component."""
    apart = np.where(sizes > MOST_NEAR, 8 * FAR_BYTES, 8 * NEAR_BYTES)
    quotients = code.quotients(sizes)
    signed = quotients > 0 if code.kind is Kind.SIGNED else sizes > 0
    levels = np.minimum(quotients, max(code.most - 1, 0))
    each = np.where(sizes > code.largest, apart, levels + signed)
    fixed = 8 * -(-len(sizes) // 8) * code.planes
    if code.kind is Kind.SPARSE:
        fixed += 8 + _marked_bytes(sizes).repeat(8, 0)[: len(sizes)].sum(0)
    return fixed + each.sum(0)


def _marked_bytes(sizes: Int[ndarray, "N W"]) -> Bool[ndarray, "8 W"]:
    """Bytes of a plane with a number that is not 0, whether its code holds it or not."""
    padded = np.zeros((ROWS, sizes.shape[1]), bool)
    padded[: len(sizes)] = sizes > 0
    return np.asarray(padded.reshape(8, 8, -1).any(1))


def _listed(
    symbols: Int[ndarray, "N W"], marked: Bool[ndarray, "N W"], kind: str
) -> UInt8[ndarray, " B"]:
    """Numbers that are written apart, in order of components and rows."""
    components, rows = marked.T.nonzero()
    listed = np.zeros(len(rows), np.dtype([("place", "<u2"), ("symbol", kind)]))
    listed["place"], listed["symbol"] = components * ROWS + rows, symbols[rows, components]
    return listed.view(np.uint8)


def _tiles(codes: Codes) -> Iterator[tuple[int, list[int]]]:
    """Components of each code, up to four at a time."""
    for code in range(len(NARROW_CODES)):
        own = (codes == code).nonzero()[0].tolist()
        for place in range(0, len(own), TILE):
            yield code, own[place : place + TILE]


class _Bits:
    """Bits that are read from the first one on; zeros behind the end."""

    def __init__(self, payload: Payload) -> None:
        self._bits = np.unpackbits(payload, bitorder="little").astype(bool)
        self.next = 0

    def take(self, count: int) -> Bool[ndarray, " N"]:
        found = self._bits[self.next : self.next + count]
        self.next += count
        return np.append(found, np.zeros(count - len(found), bool))

    def plane(self, rows: int) -> Bool[ndarray, " N"]:
        return self.take(8 * -(-rows // 8))[:rows]


def _decode(payload: Payload, count: int, width: int) -> tuple[Int[ndarray, "N W"], Tiers, bool]:
    """Symbols and tiers of a block, and whether it is whole."""
    ordered, tiers = np.zeros((count, width), np.int64), np.zeros(count, np.int8)
    place, whole = 0, True
    for first in range(0, count, ROWS):
        own = tiers[first : first + ROWS]
        planes = _Bits(payload[place : place + TIER_PLANES * -(-len(own) // 8)])
        for plane in range(TIER_PLANES):
            own += planes.plane(len(own)).astype(np.int8) << plane
        place += TIER_PLANES * -(-len(own) // 8)
    whole = place <= len(payload) and tiers.max(initial=0) <= 2 * LAST_TIER
    tiers = np.minimum(tiers, 2 * LAST_TIER) - np.int8(LAST_TIER)
    for first in range(0, count, ROWS):
        size, is_sound = _read_group(payload[place:], ordered[first : first + ROWS])
        place, whole = place + size, whole and is_sound
        if not size:
            break
    symbols = np.empty_like(ordered)
    symbols[np.argsort(tiers, kind="stable")] = ordered
    return symbols, tiers, bool(whole) and place == len(payload)


def _read_group(payload: Payload, symbols: Int[ndarray, "N W"]) -> tuple[int, bool]:
    """Bytes of a group whose symbols are written, 0 where its head is damaged, and whether it is
    whole.
    """
    rows, width = symbols.shape
    head = GROUP_HEAD + -(-width // 2)
    if len(payload) < head:
        return 0, False
    size, table = int(payload[:4].copy().view("<u4")[0]), NARROW_CODES
    if size & WIDE:
        size, table = size - WIDE, WIDE_CODES
    num_nears, num_fars = payload[4:GROUP_HEAD].copy().view("<u2").tolist()
    fars = head + NEAR_BYTES * num_nears
    planes = fars + FAR_BYTES * num_fars
    if size > len(payload) or planes > size:
        return 0, False
    halves = payload[GROUP_HEAD:head]
    codes = np.stack([halves & 15, halves >> 4], 1).reshape(-1)[:width]
    ends_well = _read_planes(_Bits(payload[planes:size]), codes, table, symbols)
    lists = payload[head:fars], payload[fars:planes]
    is_sound = [
        _put(listed, kind, symbols) for listed, kind in zip(lists, ("i1", "<i4"), strict=True)
    ]
    return size, ends_well and all(is_sound)


def _read_planes(
    fixed: _Bits, codes: Codes, table: tuple[PlaneCode, ...], symbols: ndarray
) -> bool:
    """Write the symbols of a group's planes; returns whether they end where their bytes do."""
    rows, num_bytes = len(symbols), len(fixed._bits) // 8
    rest = _Bits(np.zeros(0, np.uint8))
    rest._bits = fixed._bits
    rest.next = 8 * -(-rows // 8) * sum(table[code].planes for code in codes)
    for code, tile in _tiles(codes):
        own, kind = table[code], table[code].kind
        numbers = np.zeros((rows, len(tile)), np.int64)
        level = np.zeros((rows, len(tile)), bool)
        for place in range(len(tile)):
            for bit in range(own.raw):
                numbers[:, place] += fixed.plane(rows).astype(np.int64) << bit
            if own.most and kind is Kind.LEVELS:
                level[:, place] = fixed.plane(rows)
        if kind is Kind.SPARSE:
            marks = [rest.take(8).repeat(8)[:rows].nonzero()[0] for _ in tile]
            for place, marked in enumerate(marks):
                level[marked, place] = rest.take(len(marked))
        if kind is Kind.SIGNED:
            level = numbers == own.first
            numbers -= np.where(numbers >= own.first, 2 * own.first, 0)
        else:
            numbers += level * own.step
        signed = level.copy()
        for _ in range(1, own.most):
            for place in range(len(tile)):
                reached = level[:, place].nonzero()[0]
                level[reached, place] = rest.take(len(reached))
            numbers += level * (-1 if kind is Kind.SIGNED else own.step)
        signed = signed if kind is Kind.SIGNED else numbers != 0
        for place, component in enumerate(tile):
            held = signed[:, place].nonzero()[0]
            symbols[:, component] = numbers[:, place]
            symbols[held, component] *= np.where(rest.take(len(held)), -1, 1)
    return -(-rest.next // 8) == num_bytes


def _put(listed: UInt8[ndarray, " B"], kind: str, symbols: Int[ndarray, "N W"]) -> bool:
    """Write listed numbers; returns whether each lies in the group."""
    found = listed.copy().view(np.dtype([("place", "<u2"), ("symbol", kind)]))
    rows, components = found["place"] % ROWS, found["place"] // ROWS
    inside = (rows < symbols.shape[0]) & (components < symbols.shape[1])
    symbols[rows[inside], components[inside]] = found["symbol"][inside]
    return bool(inside.all())
