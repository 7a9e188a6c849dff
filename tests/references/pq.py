"""Product quantization in plain Python: every key rounded, then attended to."""

from __future__ import annotations

from collections.abc import Sequence

from references.lloyd import Vector, clustered
from references.recalling import Rows, attention, of_groups


def rounded(
    keys: Sequence[Vector], parts: int, centroids: int, iterations: int
) -> list[list[float]]:
    """Each key with the nearest centroid in place of each of its parts."""
    width = len(keys[0]) // parts if keys else 0
    out: list[list[float]] = [[] for _ in keys]
    for p in range(parts) if keys else ():
        points = [key[p * width : (p + 1) * width] for key in keys]
        centers, labels = clustered(points, centroids, iterations, "distance")
        for key, label in zip(out, labels, strict=True):
            key += centers[label]
    return out


def scores(queries: Sequence[Vector], keys: Sequence[Sequence[Vector]], scaling: float) -> Rows:
    """Of every kv head, the attention of its query heads to each rounded key."""
    return of_groups(attention(queries, keys, scaling), len(keys))
