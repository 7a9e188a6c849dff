"""k-means in plain Python: from evenly spaced points, a fixed number of rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = Sequence[float]


def dot(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def unit(vector: Vector) -> list[float]:
    norm = math.sqrt(dot(vector, vector))
    return [x / norm for x in vector] if norm else list(vector)


def mean(vectors: Sequence[Vector]) -> list[float]:
    return [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]


def closeness(point: Vector, center: Vector, nearness: str) -> float:
    if nearness == "distance":
        return -sum((a - b) ** 2 for a, b in zip(point, center, strict=True))
    return dot(point, unit(center))


def label(point: Vector, centers: Sequence[Vector], nearness: str) -> int:
    near = [closeness(point, center, nearness) for center in centers]
    return near.index(max(near))


def clustered(
    points: Sequence[Vector], count: int, iterations: int, nearness: str
) -> tuple[list[list[float]], list[int]]:
    centers = [list(points[(2 * c + 1) * len(points) // (2 * count)]) for c in range(count)]
    for _ in range(iterations):
        labels = [label(point, centers, nearness) for point in points]
        for c in range(count):
            own = [point for point, at in zip(points, labels, strict=True) if at == c]
            if own:
                centers[c] = mean(own)
            if nearness == "direction":
                centers[c] = unit(centers[c])
    return centers, [label(point, centers, nearness) for point in points]
