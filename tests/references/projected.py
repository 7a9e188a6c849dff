"""The projected graph in plain Python: links that queries make, and a walk from key to key."""

from __future__ import annotations

import math
from collections.abc import Sequence

from references.lloyd import Vector, dot
from references.recalling import largest

SMALL = {"least": 8, "links": 4, "degree": 6, "beam": 16}  # parameters for small layers

Edges = list[list[int]]


def distance(one: Vector, other: Vector) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)))


def spread(keys: Sequence[Vector], pivot: int, others: Sequence[int], most: int) -> list[int]:
    """Links of a pivot: those nearer to it than to any link before, then the others by nearness."""
    ranked = sorted((n for n in others if n != pivot), key=lambda n: distance(keys[n], keys[pivot]))
    linked: list[int] = []
    for n in ranked:
        own = distance(keys[n], keys[pivot])
        if all(distance(keys[n], keys[kept]) >= own for kept in linked) and len(linked) < most:
            linked.append(n)
    return [*linked, *(n for n in ranked if n not in linked)][:most]


def projected(keys: Sequence[Vector], asked: Sequence[Vector], links: int, most: int) -> Edges:
    """Links of every key, those of pivots before those that lead back to pivots."""
    answers: dict[int, set[int]] = {}
    for query in asked:
        first, *others = largest([dot(query, key) for key in keys], links)
        answers.setdefault(first, set()).update(others)
    pairs = [
        (pivot, other)
        for pivot in sorted(answers)
        for other in spread(keys, pivot, sorted(answers[pivot]), most)
    ]
    edges: Edges = [[] for _ in keys]
    for one, other in [*pairs, *((b, a) for a, b in pairs)]:
        if other not in edges[one] and len(edges[one]) < most:
            edges[one].append(other)
    return edges


def near(keys: Sequence[Vector], count: int) -> Edges:
    """Entries before and behind each key, and its nearest keys."""
    out: Edges = []
    for n, key in enumerate(keys):
        others = sorted(
            (m for m in range(len(keys)) if m != n), key=lambda m: distance(key, keys[m])
        )
        out.append([m for m in (n - 1, n + 1) if 0 <= m < len(keys)] + others[:count])
    return out


def walked(
    query: Vector, keys: Sequence[Vector], edges: Edges, entry: int, beam: int, followed: int
) -> set[int]:
    """Keys that a walk looks at: the best few of the beam are followed until all of it was."""
    seen, done = {entry: dot(query, keys[entry])}, set[int]()
    while True:
        best = sorted(seen, key=lambda n: -seen[n])[:beam]
        nodes = [n for n in best if n not in done][:followed]
        if not nodes:
            return set(seen)
        done.update(nodes)
        for node in nodes:
            seen.update((n, dot(query, keys[n])) for n in edges[node])
