"""`transform`: exact ends, tiers by importance, components and code lengths, by loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from larder.core import Entries, LayerScores, Plan

Vector = Sequence[float]
Matrix = Sequence[Sequence[float]]


def grades(
    part: Any, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
) -> list[int]:
    """One grade per kept entry: 0 for the ends of the text, that of the middle tier for others."""
    del scored, quota, share
    positions: list[int] = []
    for head in range(len(entries.lengths)):
        positions += entries.head_positions(head).tolist()
    newest = max(positions)
    found: list[int] = []
    for entry in plan.kept.tolist():
        is_exact = positions[entry] < part.sinks or newest - positions[entry] < part.recent
        found.append(0 if is_exact else 3)
    return found


def tier(score: float, median: float) -> int:
    """Tier of a score: -1 from twice the median's on, -2 from eight times, and so on down."""
    if score <= 0:
        return 2
    return max(-2, min(2, -round(math.log2(score / median) / 2)))


def component(
    vector: Vector, mean: Vector, forward: Matrix, radians: Vector, position: int, index: int
) -> float:
    """One component of a key at a position; of a value, without radians."""
    plain = list(vector)
    for pair, speed in enumerate(radians):
        x, y = vector[pair], vector[pair + len(radians)]
        angle = -position * speed
        plain[pair] = x * math.cos(angle) - y * math.sin(angle)
        plain[pair + len(radians)] = y * math.cos(angle) + x * math.sin(angle)
    return sum((plain[i] - mean[i]) * forward[i][index] for i in range(len(plain)))


def rounded(number: float, step: float, tier: int, mean: float = 0.0) -> float:
    """Decoded component around a mean."""
    own = step * 2.0**tier
    return own * math.floor((number - mean) / own + 0.5) + mean


def means(entries: Matrix) -> list[float]:
    """Mean of each component of the entries of a head, in codes of a byte.

    Keys and values, which are the halves of an entry, have a scale each.
    """
    plain = [
        sum(entry[index] for entry in entries) / len(entries) for index in range(len(entries[0]))
    ]
    half, found = len(plain) // 2, list[float]()
    for side in (plain[:half], plain[half:]):
        scale = max(abs(mean) for mean in side) / 127
        found += [scale * round(mean / scale) for mean in side]
    return found


def shares(ratio: float, raw: int, codes: int, middle: int) -> list[float]:
    """Probability of each code: Student's t, 10 degrees of freedom, unit variance, summed."""
    density = lambda x: (1 + x * x / 8) ** -5.5  # noqa: E731
    grid = 1 / 200
    whole = sum(density(i * grid) for i in range(-16000, 16001)) * grid
    found: list[float] = []
    for code in range(codes):
        low = ((code - middle) * 2**raw - 0.5) / ratio
        high = ((code + 1 - middle) * 2**raw - 0.5) / ratio
        pieces = 400
        width = (high - low) / pieces
        total = sum(density(low + (i + 0.5) * width) for i in range(pieces)) * width
        found.append(total / whole)
    return found


def metric(queries: Matrix, radians: Vector, distances: Sequence[int]) -> list[list[float]]:
    """Mean over queries and distances of R q (R q)'."""
    size = len(queries[0])
    total = [[0.0] * size for _ in range(size)]
    for query in queries:
        for distance in distances:
            turned = list(query)
            for pair, speed in enumerate(radians):
                x, y, angle = query[pair], query[pair + len(radians)], distance * speed
                turned[pair] = x * math.cos(angle) - y * math.sin(angle)
                turned[pair + len(radians)] = y * math.cos(angle) + x * math.sin(angle)
            for i in range(size):
                for j in range(size):
                    total[i][j] += turned[i] * turned[j] / len(queries) / len(distances)
    return total


def attention(query: Vector, keys: Matrix, values: Matrix, scaling: float) -> list[float]:
    """Attention of one query over decoded entries."""
    logits = [scaling * sum(q * k for q, k in zip(query, key, strict=True)) for key in keys]
    peak = max(logits)
    weights = [math.exp(logit - peak) for logit in logits]
    total = sum(weights)
    return [
        sum(w * value[d] for w, value in zip(weights, values, strict=True)) / total
        for d in range(len(values[0]))
    ]


def decoded_symbols(
    words: Sequence[int], count: int, bases: Sequence[int], model: Any
) -> tuple[list[list[int]], list[int]]:
    """Symbols and tier of each entry, from the words of the range coder, one after the other."""
    lanes, given = min(count, 32), iter(words)
    states = [next(given) * 65536 + next(given) for _ in range(lanes)]

    def take(lane: int) -> None:
        if states[lane] < 65536:
            states[lane] = states[lane] * 65536 + next(given, 0)

    def code(lane: int, row: int) -> int:
        high, slot = divmod(states[lane], 4096)
        found = int(model.slots[row][slot])
        frequency = int(model.starts[row][found + 1]) - int(model.starts[row][found])
        states[lane] = frequency * high + int(model.ranks[row][slot])
        take(lane)
        return found

    def raw(lane: int, bits: int) -> int:
        high, slot = divmod(states[lane], 4096)
        found, rest = divmod(slot, 2 ** (12 - bits))
        states[lane] = high * 2 ** (12 - bits) + rest
        take(lane)
        return found

    classes = len(model.starts) - 1
    tiers = [code(n % 32, classes) - 2 for n in range(count)]
    order = sorted(range(count), key=lambda n: (tiers[n], n))
    symbols = [[0] * len(bases) for _ in range(count)]
    for index, base in enumerate(bases):
        for first in range(0, count, 32):
            group = order[first : first + 32]
            rows = [min(max(base - 4 * tiers[n], 0), classes - 1) for n in group]
            codes = [code(lane, row) for lane, row in enumerate(rows)]
            sizes = [
                32 if own == 64 else int(model.raw_bits[row])
                for own, row in zip(codes, rows, strict=True)
            ]
            numbers = [0 if own == 64 else own - 32 for own in codes]
            for chunk in (3, 2, 1, 0):
                for lane, size in enumerate(sizes):
                    bits = min(max(size - 8 * chunk, 0), 8)
                    if bits:
                        numbers[lane] = numbers[lane] * 2**bits + raw(lane, bits)
            for n, number, size in zip(group, numbers, sizes, strict=True):
                escaped = size == 32 and number >= 2**31
                symbols[n][index] = number - 2**32 if escaped else number
    return symbols, tiers
