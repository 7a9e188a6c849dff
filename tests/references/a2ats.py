"""A2ATS in plain Python: a metric of queries, codes of unrotated keys, and clipped products."""

from __future__ import annotations

import math
from collections.abc import Sequence

from references.lloyd import Vector, clustered, dot
from references.recalling import largest

SMALL = {"clip": 0}  # parameters for small layers

Matrix = list[list[float]]


def turned(row: Vector, position: int, radians: Sequence[float]) -> list[float]:
    """A vector rotated to a position; dimension d is paired with d + half."""
    out, half = list(row), len(radians)
    for d, angle in enumerate(position * radian for radian in radians):
        a, b = row[d], row[d + half]
        out[d] = a * math.cos(angle) - b * math.sin(angle)
        out[d + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def moment(queries: Sequence[Vector], ridge: float = 1e-6) -> Matrix:
    """Sum of q q^T over its root mean square, plus the ridge."""
    size = range(len(queries[0]))
    sums = [[sum(q[a] * q[b] for q in queries) for b in size] for a in size]
    scale = math.sqrt(sum(x * x for row in sums for x in row) / len(size) ** 2)
    return [[sums[a][b] / scale + ridge * (a == b) for b in size] for a in size]


def root(matrix: Matrix) -> Matrix:
    """Lower triangular L with L L^T = matrix, row by row."""
    low = [[0.0] * len(matrix) for _ in matrix]
    for a in range(len(matrix)):
        for b in range(a + 1):
            rest = matrix[a][b] - sum(low[a][c] * low[b][c] for c in range(b))
            low[a][b] = math.sqrt(rest) if a == b else rest / low[b][b]
    return low


def times(row: Vector, matrix: Matrix) -> list[float]:
    return [dot(row, column) for column in zip(*matrix, strict=True)]


def codes(keys: Sequence[Vector], low: Matrix, count: int, iterations: int) -> Matrix:
    """For every unrotated key the center, in key space, of its cluster of keys times L."""
    points = [times(key, low) for key in keys]
    centers, labels = clustered(points, min(count, len(points)), iterations, "distance")
    return [unrooted(centers[label], low) for label in labels]


def unrooted(row: Vector, low: Matrix) -> list[float]:
    """The x of x L = row, from the last number to the first."""
    out = [0.0] * len(row)
    for a in reversed(range(len(row))):
        known = sum(out[b] * low[b][a] for b in range(a + 1, len(row)))
        out[a] = (row[a] - known) / low[a][a]
    return out


def union(rows: Sequence[Sequence[float]], count: int) -> list[int]:
    """The best of every row, then their second best, and so on, without repeats."""
    ranked = [largest(row, len(row)) for row in rows]
    out: list[int] = []
    for each in zip(*ranked, strict=True):
        out += [n for n in dict.fromkeys(each) if n not in out]
    return out[:count]
