"""Bit planes of transform components, read bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

NARROW = (
    *((0, 0, "levels"), (0, 1, "sparse"), (0, 1, "levels"), (0, 2, "levels"), (0, 3, "sparse")),
    *((0, 7, "levels"), (2, 2, "signed"), (2, 3, "signed"), (2, 7, "signed"), (3, 7, "signed")),
    *((4, 7, "signed"), (1, 7, "levels"), (2, 7, "levels"), (3, 7, "levels"), (4, 7, "levels")),
    (5, 3, "levels"),
)
WIDE = tuple((raw, 7, "levels") for raw in range(0, 32, 2))


def decoded(payload: Sequence[int], entries: int, width: int) -> tuple[list[list[int]], list[int]]:
    """Symbols and tiers of a block."""
    tiers, place = list[int](), 0
    for first in range(0, entries, 64):
        rows = min(64, entries - first)
        size = (rows + 7) // 8
        for row in range(rows):
            planes = [payload[place + p * size + row // 8] >> row % 8 & 1 for p in range(3)]
            tiers.append(planes[0] + 2 * planes[1] + 4 * planes[2] - 2)
        place += 3 * size
    order = sorted(range(entries), key=lambda entry: tiers[entry])
    symbols = [[0] * width for _ in range(entries)]
    for first in range(0, entries, 64):
        rows = order[first : first + 64]
        size = number_at(payload, place, 4) & 0x7FFFFFFF
        found = group(payload[place : place + size], len(rows), width)
        for row, entry in enumerate(rows):
            symbols[entry] = [found[component][row] for component in range(width)]
        place += size
    assert place == len(payload)
    return symbols, tiers


def number_at(payload: Sequence[int], place: int, size: int) -> int:
    return int.from_bytes(bytes(payload[place : place + size]), "little")


def signed(payload: Sequence[int], place: int, size: int) -> int:
    return int.from_bytes(bytes(payload[place : place + size]), "little", signed=True)


class Group:
    """Group of rows while it is read.

    Attributes:
        plane: byte of the next plane.
        bit: next bit of what follows the planes.
    """

    def __init__(self, payload: Sequence[int], rows: int, width: int) -> None:
        self.payload, self.rows = payload, rows
        self.table = WIDE if payload[3] & 0x80 else NARROW
        self.counts = number_at(payload, 4, 2), number_at(payload, 6, 2)
        self.codes = [payload[8 + c // 2] >> 4 * (c % 2) & 15 for c in range(width)]
        self.lists = 8 + (width + 1) // 2
        self.plane = self.lists + 3 * self.counts[0] + 6 * self.counts[1]
        own = [self.table[code] for code in self.codes]
        fixed = sum(raw + (most > 0 and kind == "levels") for raw, most, kind in own)
        self.bit = 8 * (self.plane + fixed * ((rows + 7) // 8))

    def take(self) -> int:
        self.bit += 1
        return self.payload[(self.bit - 1) // 8] >> (self.bit - 1) % 8 & 1

    def take_plane(self) -> list[int]:
        start = self.plane
        self.plane += (self.rows + 7) // 8
        return [self.payload[start + row // 8] >> row % 8 & 1 for row in range(self.rows)]

    def tiles(self, code: int) -> list[list[int]]:
        members = [c for c, own in enumerate(self.codes) if own == code]
        return [members[at : at + 4] for at in range(0, len(members), 4)]

    def listed(self) -> list[tuple[int, int]]:
        """Place and symbol of each number that is written apart."""
        found, at = list[tuple[int, int]](), self.lists
        for size, count in zip((3, 6), self.counts, strict=True):
            for _ in range(count):
                symbol = signed(self.payload, at + 2, size - 2)
                found.append((number_at(self.payload, at, 2), symbol))
                at += size
        return found


def group(payload: Sequence[int], rows: int, width: int) -> list[list[int]]:
    """Symbols of each component of a group."""
    own, symbols = Group(payload, rows, width), [[0] * rows for _ in range(width)]
    for code, given in enumerate(own.table):
        for tile in own.tiles(code):
            found = tile_symbols(own, *given, len(tile))
            for component, numbers in zip(tile, found, strict=True):
                symbols[component] = numbers
    for place, symbol in own.listed():
        symbols[place // 64][place % 64] = symbol
    return symbols


def tile_symbols(own: Group, raw: int, most: int, kind: str, count: int) -> list[list[int]]:
    """Symbols of some components of one code."""
    sizes, reached = list[list[int]](), [[False] * own.rows for _ in range(count)]
    for place in range(count):
        planes = [own.take_plane() for _ in range(raw)]
        sizes.append(
            [
                sum(plane[row] << power for power, plane in enumerate(planes))
                for row in range(own.rows)
            ]
        )
        if most and kind == "levels":
            reached[place] = [bit == 1 for bit in own.take_plane()]
    if kind == "sparse":
        marks = [[own.take() for _ in range(8)] for _ in range(count)]
        reached = [
            [bool(mark[row // 8] and own.take()) for row in range(own.rows)] for mark in marks
        ]
    if kind == "signed":
        return signed_symbols(own, 1 << (raw - 1), most, sizes)
    for level in range(1, most + 1):
        if level > 1:
            reached = [[bool(was and own.take()) for was in rows] for rows in reached]
        for place in range(count):
            sizes[place] = [
                size + (there << raw)
                for size, there in zip(sizes[place], reached[place], strict=True)
            ]
    return [[-size if size and own.take() else size for size in rows] for rows in sizes]


def signed_symbols(own: Group, middle: int, most: int, raws: list[list[int]]) -> list[list[int]]:
    """Symbols whose raw bits are in two's complement; the lowest number goes on in levels of 1."""
    beyond = [[middle if number == middle else 0 for number in rows] for rows in raws]
    for level in range(1, most):
        beyond = [
            [size + own.take() if size == middle + level - 1 else size for size in rows]
            for rows in beyond
        ]
    plain = [[n - 2 * middle if n > middle else n for n in rows] for rows in raws]
    return [
        [
            (size if own.take() else -size) if size else number
            for size, number in zip(*pair, strict=True)
        ]
        for pair in zip(beyond, plain, strict=True)
    ]
