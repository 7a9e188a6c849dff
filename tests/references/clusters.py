"""Clusters in plain Python: whole clusters in rank order, the last one trimmed."""

from __future__ import annotations

from collections.abc import Sequence

from references.lloyd import Vector, clustered, dot, label
from references.recalling import largest

SMALL = {"size": 4}  # parameters for small layers


def find(query: Vector, centers: Sequence[Vector], labels: Sequence[int], count: int) -> list[int]:
    """Entries for one query head."""
    found: list[int] = []
    for cluster in largest([dot(query, center) for center in centers], len(centers)):
        found += [entry for entry, own in enumerate(labels) if own == cluster]
    return found[:count]


def made(keys: Sequence[Vector], size: int, iterations: int) -> tuple[list[list[float]], list[int]]:
    return clustered(keys, max(len(keys) // size, 1), iterations, "cosine")


def joined(key: Vector, centers: Sequence[Vector]) -> int:
    """The cluster of a key that came later."""
    return label(key, centers, "cosine")
