"""Rounding to codes, one number at a time; and whole groups of entries, one vector at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

Rows = Sequence[Sequence[float]]


def spacing(number: float) -> float:
    """Spacing of float16 numbers around this one."""
    exponent = math.frexp(abs(number))[1] - 1 if number else -14
    return 2.0 ** (max(exponent, -14) - 10)


def half(number: float) -> float:
    return round(number / spacing(number)) * spacing(number)


def half_below(number: float) -> float:
    return math.floor(number / spacing(number)) * spacing(number)


@dataclass(frozen=True)
class Group:
    offset: float
    scale: float
    codes: list[int]

    def numbers(self) -> list[float]:
        return [self.offset + self.scale * code for code in self.codes]


def quantized(numbers: Sequence[float], bits: int) -> Group:
    """One group that shares its offset and scale."""
    low, high = min(numbers), max(numbers)
    if low == high:
        return Group(half(low), 0.0, [0] * len(numbers))
    offset = half_below(low)
    scale = -half_below(-(high - offset) / (2**bits - 1))
    nearest = [
        min(range(2**bits), key=lambda code, x=x: abs(x - offset - scale * code)) for x in numbers
    ]
    return Group(offset, scale, nearest)


def rounded(
    rows: Rows,
    bits: int,
    piece: int,
    by_channel: bool,
    outliers: float = 0.0,
    kept: int | None = None,
    balance: float = 0.0,
    weights: Sequence[float] | None = None,
) -> list[list[float]]:
    """Entries of one group after rounding; lost channels are 0."""
    width = len(rows[0])
    chosen = list(range(width))
    if kept is not None and kept < width:
        energy = weights or [sum(row[c] ** 2 for row in rows) for c in range(width)]
        chosen = sorted(sorted(chosen, key=lambda c: (-energy[c], c))[:kept])
    factors = [1.0] * width
    if balance:
        sizes = weights or [max(abs(row[c]) for row in rows) for c in range(width)]
        factors = [half(max((size / max(sizes)) ** balance, 2.0**-8)) for size in sizes]
    out = [[0.0] * width for _ in rows]
    if not bits:
        for r, row in enumerate(rows):
            for c in chosen:
                out[r][c] = row[c]
        return out
    number = {(r, c): rows[r][c] / factors[c] for r in range(len(rows)) for c in chosen}
    if by_channel:
        vectors = [[(r, c) for r in range(len(rows))] for c in chosen]
    else:
        cut = [chosen[start : start + piece] for start in range(0, len(chosen), piece)]
        vectors = [[(r, c) for c in part] for r in range(len(rows)) for part in cut]
    middle = {}
    for vector in vectors:
        whole = [number[position] for position in vector]
        if not by_channel:  # the last piece is filled up with its last number
            whole += [whole[-1]] * (piece - len(whole))
        middle |= dict.fromkeys(vector, median_low(whole))
    ranked = sorted(number, key=lambda at: (-abs(number[at] - middle[at]), at))
    far = set(ranked[: int(outliers * len(rows) * len(chosen))])
    for vector in vectors:
        calm = [middle[at] if at in far else number[at] for at in vector]
        group = quantized(calm, bits)
        for (r, c), worth in zip(vector, group.numbers(), strict=True):
            exact = half(number[r, c]) if (r, c) in far else worth
            out[r][c] = exact * factors[c]
    return out
