"""Squeezed Attention in plain Python: scores of clusters, their thresholds, what exceeds them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from references.lloyd import Vector, clustered, dot, mean

SMALL = {"share": 0.25, "coarse": 0.1}  # parameters for small layers

Clusters = list[list[int]]


def clusters_of(keys: Sequence[Vector], share: float, iterations: int) -> Clusters:
    """Entries of each cluster, by the distance of keys of length 1."""
    count = max(int(share * len(keys)), 1)
    _, labels = clustered([unit(key) for key in keys], count, iterations, "distance")
    return [[n for n, at in enumerate(labels) if at == c] for c in range(count)]


def coarse_clusters_of(
    keys: Sequence[Vector], clusters: Clusters, share: float, iterations: int
) -> Clusters:
    """Clusters in each cluster of their centroids."""
    centers = [mean([keys[n] for n in cluster]) for cluster in clusters]
    return clusters_of(centers, share * len(keys) / len(centers), iterations)


def coarse_scores(
    query: Vector, keys: Sequence[Vector], clusters: Clusters, coarse: Clusters, scaling: float
) -> list[float]:
    """Estimated attention of one query to an entry of each coarse cluster."""
    centers = [mean([keys[n] for n in cluster]) for cluster in clusters]
    own = [mean([centers[c] for c in group]) for group in coarse]
    logits = [scaling * dot(query, center) for center in own]
    return shares(logits, [sum(len(clusters[c]) for c in group) for group in coarse])


def surviving(own: Sequence[float], coarse: Clusters, least: float, clusters: Clusters) -> Clusters:
    """Clusters, those emptied whose coarse cluster has no score above the threshold."""
    out = [[] for _ in clusters]
    for score, group in zip(own, coarse, strict=True):
        for c in group if score > least or least == 0 else []:
            out[c] = clusters[c]
    return out


def unit(row: Vector) -> list[float]:
    length = math.sqrt(dot(row, row)) or 1.0
    return [number / length for number in row]


def scores(
    query: Vector, keys: Sequence[Vector], clusters: Clusters, scaling: float
) -> list[float]:
    """Estimated attention of one query to an entry of each cluster."""
    own = [mean([keys[n] for n in cluster]) if cluster else None for cluster in clusters]
    logits = [None if center is None else scaling * dot(query, center) for center in own]
    return shares(logits, [len(cluster) for cluster in clusters])


def shares(logits: Sequence[float | None], sizes: Sequence[int]) -> list[float]:
    total = sum(
        n * math.exp(logit) for logit, n in zip(logits, sizes, strict=True) if logit is not None
    )
    return [0.0 if logit is None else math.exp(logit) / total for logit in logits]


def threshold(scored: Sequence[tuple[float, int]], dropped: float) -> float:
    """Largest score that leaves out at most a share of the entries; 0 if that is none.

    Args:
        scored: score and size of the clusters of all layers and heads.
    """
    total, best = sum(n for _, n in scored), 0.0
    for score, size in scored:
        if size and sum(n for other, n in scored if other <= score) <= dropped * total:
            best = max(best, score)
    return best


def above(
    own: Sequence[float], clusters: Clusters, least: float, pending: Sequence[int], count: int
) -> list[int]:
    """Entries outside any cluster, then those of clusters above the threshold, the best first."""
    ranked = [
        (-score, n)
        for score, cluster in zip(own, clusters, strict=True)
        for n in cluster
        if score > least or least == 0
    ]
    return [*pending, *(n for _, n in sorted(ranked))][:count]
