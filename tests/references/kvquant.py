"""`kvquant`: exact ends, nearest levels, outliers apart, and k-means, by loops."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from references.transform import grades

__all__ = ["grades", "half", "held_keys", "held_value", "levels", "nearest"]

Vector = Sequence[float]


def half(number: float) -> float:
    """Nearest float16."""
    return struct.unpack("e", struct.pack("e", number))[0]


def nearest(number: float, levels: Vector) -> float:
    """Nearest level, the lower one of two as near."""
    return min(levels, key=lambda level: (abs(number - level), level))


def held_keys(keys: Sequence[Vector], levels: Vector, share: float) -> list[list[float]]:
    """Normalized keys of a block as they are held."""
    positions = [(row, column) for row, key in enumerate(keys) for column in range(len(key))]
    apart = sorted(positions, key=lambda index: -abs(keys[index[0]][index[1]]))
    apart = apart[: int(share * len(positions))]
    return [
        [
            half(number) if abs(number) > 1 and (row, column) in apart else nearest(number, levels)
            for column, number in enumerate(key)
        ]
        for row, key in enumerate(keys)
    ]


def held_value(value: Vector, levels: Vector, share: float) -> list[float]:
    """Value as it is held."""
    ordered = sorted(value)
    size = len(value)
    median = (ordered[(size - 1) // 2] + ordered[size // 2]) / 2
    order = sorted(range(size), key=lambda index: -abs(value[index] - median))
    apart = order[: round(share * size)]
    inner = [number for index, number in enumerate(value) if index not in apart]
    middle, reach = half((max(inner) + min(inner)) / 2), half((max(inner) - min(inner)) / 2)
    found: list[float] = []
    for index, number in enumerate(value):
        if index in apart:
            found.append(half(number))
        else:
            scaled = (number - middle) / reach if reach else 0.0
            found.append(middle + reach * nearest(scaled, levels))
    return found


def levels(numbers: Vector, weights: Vector, count: int, rounds: int) -> list[float]:
    """Centers of k-means, from evenly spaced quantiles on."""
    ordered = sorted(numbers)
    found = [ordered[int((index + 0.5) / count * len(ordered))] for index in range(count)]
    for _ in range(rounds):
        sums, masses = [0.0] * count, [0.0] * count
        for number, weight in zip(numbers, weights, strict=True):
            own = min(range(count), key=lambda index: abs(number - found[index]))
            sums[own] += weight * number
            masses[own] += weight
        found = [s / m if m else f for s, m, f in zip(sums, masses, found, strict=True)]
    return found
