"""The graph's signposts in plain Python; of the graph itself, only what it may at best find."""

from __future__ import annotations

from collections.abc import Sequence

from references.lloyd import Vector, dot, unit
from references.recalling import largest

SMALL = {"least": 8, "links": 4}  # parameters for small layers


def links(observed: Vector, keys: Sequence[Vector], count: int) -> list[int]:
    """The exact nearest keys of an observed query."""
    return largest([dot(observed, key) for key in keys], count)


def linked(
    query: Vector, observed: Sequence[Vector], keys: Sequence[Vector], guides: int, count: int
) -> set[int]:
    """Entries linked to the observed queries that are nearest in angle."""
    likeness = [dot(query, unit(other)) for other in observed]
    return {
        key for guide in largest(likeness, guides) for key in links(observed[guide], keys, count)
    }


def products(query: Vector, keys: Sequence[Vector]) -> list[float]:
    return [dot(query, key) for key in keys]
