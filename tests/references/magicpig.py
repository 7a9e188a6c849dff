"""MagicPIG in plain Python: hashes, collisions, the chance of two, and weighted attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

from references.lloyd import Vector, dot, mean

Tables = Sequence[Sequence[Vector]]  # directions of each table


def code(row: Vector, directions: Sequence[Vector]) -> tuple[bool, ...]:
    """Signs of the products of a vector with the directions of one table."""
    return tuple(dot(row, direction) > 0 for direction in directions)


def less(row: Vector, middle: Vector) -> list[float]:
    return [a - b for a, b in zip(row, middle, strict=True)]


def drawn(query: Vector, keys: Sequence[Vector], tables: Tables) -> list[int]:
    """Keys that collide with the query in two tables or more; keys less their mean."""
    middle, found = mean(keys), []
    for number, key in enumerate(keys):
        hits = sum(code(query, own) == code(less(key, middle), own) for own in tables)
        if hits >= 2:
            found.append(number)
    return found


def chance(cosine: float, bits: int, tables: int) -> float:
    """Chance that a key at this angle collides in at least two of the tables."""
    one = (1 - math.acos(max(-1.0, min(1.0, cosine))) / math.pi) ** bits
    return 1 - (1 - one) ** tables - tables * one * (1 - one) ** (tables - 1)


def cosine(query: Vector, key: Vector) -> float:
    lengths = math.sqrt(dot(query, query) * dot(key, key))
    return dot(query, key) / lengths if lengths else 0.0


def log_weight(query: Vector, key: Vector, middle: Vector, bits: int, tables: int) -> float:
    """Amount by which the logit of a drawn key is raised."""
    return -math.log(chance(cosine(query, less(key, middle)), bits, tables))


def attended(
    query: Vector, entries: Sequence[tuple[Vector, Vector, float]], scaling: float
) -> list[float]:
    """Attention to keys and values with log-weights."""
    powers = [math.exp(scaling * dot(query, key) + weight) for key, _, weight in entries]
    values = [value for _, value, _ in entries]
    return [
        sum(power * number for power, number in zip(powers, column, strict=True)) / sum(powers)
        for column in zip(*values, strict=True)
    ]
