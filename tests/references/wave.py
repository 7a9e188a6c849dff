"""The wave index in plain Python: segments, clusters, pages, and what is estimated."""

from __future__ import annotations

import math
from collections.abc import Sequence

from references.lloyd import Vector, clustered, dot, mean
from references.recalling import Rows, attention, largest, of_groups

SMALL = {"update": 64}  # parameters for small layers

Pages = list[list[int]]


def cut(members: Sequence[int], page: int) -> Pages:
    """A cluster as pages, equally full."""
    pieces = math.ceil(len(members) / page)
    edges = [p * len(members) // pieces for p in range(pieces + 1)] if pieces else [0]
    return [list(members[edges[p] : edges[p + 1]]) for p in range(pieces)]


def segment(keys: Sequence[Vector], first: int, size: int, iterations: int, page: int) -> Pages:
    """Pages of the clusters of one segment, whose entries begin at `first`."""
    middle = mean(keys)
    centered = [[a - b for a, b in zip(key, middle, strict=True)] for key in keys]
    count = max(len(keys) // size, 1)
    _, labels = clustered(centered, count, iterations, "direction")
    clusters = [[first + n for n, at in enumerate(labels) if at == c] for c in range(count)]
    return [piece for members in clusters for piece in cut(members, page)]


def pages_of(
    keys: Sequence[Vector],
    lengths: Sequence[int],
    page: int,
    size: int,
    most: int,
    update: int,
    iterations: int,
) -> Pages:
    """Pages of a head that grew to each of `lengths` in turn."""
    settled: Pages = []
    done = 0
    for length in lengths:
        while length - done >= update:
            step = min((length - done) // update * update, most)
            settled += segment(keys[done : done + step], done, size, iterations, page)
            done += step
    rest = list(range(done, lengths[-1]))
    return settled + [rest[at : at + page] for at in range(0, len(rest), page)]


def pending(lengths: Sequence[int], most: int, update: int) -> int:
    """Entries of a head that are in no cluster yet, the last ones."""
    done = 0
    for length in lengths:
        while length - done >= update:
            done += min((length - done) // update * update, most)
    return lengths[-1] - done


def with_pending(scores: Sequence[float], pages: Pages, left: int) -> list[float]:
    """Pages with those of pending entries before all others."""
    first = pages[-1][-1] + 1 - left if pages else 0
    return [
        math.inf if page[0] >= first and left else s for s, page in zip(scores, pages, strict=True)
    ]


def means(rows: Sequence[Vector], pages: Pages) -> list[list[float]]:
    return [mean([rows[entry] for entry in page]) for page in pages]


def scores(queries: Sequence[Vector], keys: Sequence[Rows], scaling: float) -> Rows:
    """Of every kv head, the attention to the mean key of each page."""
    return of_groups(attention(queries, keys, scaling), len(keys))


def mass(
    queries: Sequence[Vector], keys: Sequence[Rows], pages: Sequence[Pages], scaling: float
) -> Rows:
    """Of every kv head, the true attention to all entries of each page."""
    own = of_groups(attention(queries, keys, scaling), len(keys))
    return [[sum(own[k][entry] for entry in page) for page in each] for k, each in enumerate(pages)]


def ranked(numbers: Sequence[float]) -> list[int]:
    return largest(numbers, len(numbers))


def attended(
    query: Vector, keys: Rows, values: Rows, log_counts: Sequence[float], scaling: float
) -> list[float]:
    """Attention to entries that count as many."""
    powers = [
        math.exp(scaling * dot(query, key) + log) for key, log in zip(keys, log_counts, strict=True)
    ]
    return [
        sum(power * number for power, number in zip(powers, column, strict=True)) / sum(powers)
        for column in zip(*values, strict=True)
    ]
