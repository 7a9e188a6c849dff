"""k-means over the keys of one head: always from evenly spaced entries, so always the same.

Stuart Lloyd, "Least squares quantization in PCM" (1982): assign, then move centers to their means;
a center that nothing is assigned to stays where it is. Equally near centers: the lower number.
"""

from __future__ import annotations

from enum import Enum

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import normalize

MAX_PRODUCTS = 1 << 22  # of one chunk: 16 MiB


class ClusterMetric(Enum):
    """What the nearest center is.

    DISTANCE: the one at the smallest Euclidean distance.
    COSINE: the one at the smallest angle; centers are plain means.
    DIRECTION: the one of the largest product; centers have length 1.
    """

    DISTANCE = "distance"
    COSINE = "cosine"
    DIRECTION = "direction"


def initial_centers(points: Float[Tensor, "S D"], count: int) -> Float[Tensor, "C D"]:
    """Centers to begin with."""
    return points[(2 * torch.arange(count) + 1) * len(points) // (2 * count)].clone()


def assign_clusters(
    points: Float[Tensor, "S D"], centers: Float[Tensor, "C D"], nearness: ClusterMetric
) -> Int64[Tensor, " S"]:
    """The center of each point. Lengths of points change no answer, so they stay as they are."""
    if nearness is not ClusterMetric.DISTANCE:
        centers = normalize(centers, dim=-1)
    credit = centers.square().sum(-1) / 2 if nearness is ClusterMetric.DISTANCE else None
    found: list[Tensor] = []
    for some in points.split(max(MAX_PRODUCTS // len(centers), 1)):
        products = some @ centers.T
        found.append((products if credit is None else products.sub_(credit)).argmax(1))
    return torch.cat(found)


def update_centers(
    points: Float[Tensor, "S D"], labels: Int64[Tensor, " S"], centers: Float[Tensor, "C D"]
) -> Float[Tensor, "C D"]:
    """The mean of the points of each center; the center itself where it has none."""
    sums = torch.zeros_like(centers).index_add_(0, labels, points)
    counts = torch.bincount(labels, minlength=len(centers))[:, None]
    return torch.where(counts > 0, sums / counts.clamp(min=1), centers)


def kmeans(
    points: Float[Tensor, "S D"], count: int, iterations: int, nearness: ClusterMetric
) -> tuple[Float[Tensor, "C D"], Int64[Tensor, " S"]]:
    """`count` centers and the center of each point."""
    centers = initial_centers(points, count)
    for _ in range(iterations):
        centers = update_centers(points, assign_clusters(points, centers, nearness), centers)
        if nearness is ClusterMetric.DIRECTION:
            centers = normalize(centers, dim=-1)
    return centers, assign_clusters(points, centers, nearness)
