"""Deterministic k-means over the keys of one head, and pages of clusters.

Stuart Lloyd, "Least squares quantization in PCM" (1982): assign, then move centers to their means;
a center without points stays where it is. Initial centers are evenly spaced entries. Ties between
centers go to the lower number.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import normalize, pad

from larder.recall._index_base import grow_table, trim_table

MAX_PRODUCTS = 1 << 22  # of one chunk: 16 MiB


class ClusterMetric(Enum):
    """Metric of the nearest center.

    DISTANCE: smallest Euclidean distance.
    COSINE: smallest angle; centers are plain means.
    DIRECTION: largest product; centers have length 1.
    """

    DISTANCE = "distance"
    COSINE = "cosine"
    DIRECTION = "direction"


def initial_centers(points: Float[Tensor, "S D"], count: int) -> Float[Tensor, "C D"]:
    """Initial centers: evenly spaced points."""
    return points[(2 * torch.arange(count) + 1) * len(points) // (2 * count)].clone()


def assign_clusters(
    points: Float[Tensor, "S D"], centers: Float[Tensor, "C D"], nearness: ClusterMetric
) -> Int64[Tensor, " S"]:
    """Nearest center of each point. Lengths of points change no result, so points stay as is."""
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
    """Mean of the points of each center; the center itself if it has none."""
    sums = torch.zeros_like(centers).index_add_(0, labels, points)
    counts = torch.bincount(labels, minlength=len(centers))[:, None]
    return torch.where(counts > 0, sums / counts.clamp(min=1), centers)


def kmeans(
    points: Float[Tensor, "S D"], count: int, iterations: int, nearness: ClusterMetric
) -> tuple[Float[Tensor, "C D"], Int64[Tensor, " S"]]:
    """Centers, and the nearest center of each point."""
    centers = initial_centers(points, count)
    for _ in range(iterations):
        centers = update_centers(points, assign_clusters(points, centers, nearness), centers)
        if nearness is ClusterMetric.DIRECTION:
            centers = normalize(centers, dim=-1)
    return centers, assign_clusters(points, centers, nearness)


class ClusterPages:
    """Entries of each page of each kv head, and page versions.

    Args:
        page: maximum entries of a page.
    """

    def __init__(self, heads: int, page: int) -> None:
        self._page = page
        self._lengths = torch.zeros(heads, dtype=torch.int64)
        self._counts = torch.zeros(heads, dtype=torch.int64)
        self._order = torch.zeros(heads, 0, dtype=torch.int32)
        self._firsts = torch.zeros(heads, 0, dtype=torch.int64)
        self._versions = torch.zeros(heads, 0, dtype=torch.int64)  # of pages that are gone, too

    @property
    def indexed(self) -> tuple[int, ...]:
        return tuple(self._lengths.tolist())

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(self._counts.tolist())

    @property
    def width(self) -> int:
        """Page capacity of the tables."""
        return self._firsts.shape[1]

    def replace(
        self,
        head: int,
        page: int,
        start: int,
        order: Int64[Tensor, " S"],
        firsts: Int64[Tensor, " P"],
    ) -> None:
        """Replace the pages from `page` on, whose entries begin at `start` in the order.

        Args:
            order: all entries from there on, in the order of the new pages.
            firsts: where in the whole order each new page begins.
        """
        before = self._of_head(head, page)
        length, count = start + len(order), page + len(firsts)
        self._order = grow_table(self._order, length)
        self._firsts, self._versions = (
            grow_table(self._firsts, count),
            grow_table(self._versions, count),
        )
        self._order[head, start:length] = order.int()
        self._firsts[head, page:count] = firsts
        self._lengths[head], self._counts[head] = length, count
        after = self._of_head(head, page)
        most = max(len(before), len(after))
        before = pad(before, (0, 0, 0, most - len(before)), value=-1)
        after = pad(after, (0, 0, 0, most - len(after)), value=-1)
        self._versions[head, page : page + most] += (before != after).any(1)

    def _of_head(self, head: int, page: int) -> Int64[Tensor, "P L"]:
        """Contents of the pages of one head from `page` on."""
        pages = torch.full((len(self._counts), max(int(self._counts[head]) - page, 0)), -1)
        pages[head] = torch.arange(page, page + pages.shape[1])
        return self.contents(pages)[head]

    def tail_pages(self, head: int, page: int) -> tuple[Int64[Tensor, " S"], Int64[Tensor, " P"]]:
        """Entries of the pages from `page` on, in order, and the number of entries of each."""
        firsts = self._firsts[head, page : int(self._counts[head])]
        edges = torch.cat([firsts, self._lengths[head : head + 1]])
        return self._order[head, int(edges[0]) : int(edges[-1])].long(), edges.diff()

    def contents(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P S"]:
        firsts, stops = self._edges(pages)
        indices = firsts[..., None] + torch.arange(self._page)
        missing = indices >= stops[..., None]
        if not self._order.shape[1]:
            return torch.full_like(indices, -1)
        heads = self._heads(pages)[..., None]
        held = self._order[heads, indices.masked_fill(missing, 0)].long()
        return held.masked_fill(missing, -1)

    def fills(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P"]:
        """Number of entries in each page."""
        firsts, stops = self._edges(pages)
        return stops - firsts

    def versions(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P"]:
        if not self._versions.shape[1]:
            return torch.zeros_like(pages)
        found = self._versions[self._heads(pages), pages.clamp(min=0)]
        return found.masked_fill(pages < 0, 0)

    def page_of(self) -> Int64[Tensor, "K M"]:
        """Page of each entry; 0 after the last entry of a head."""
        pages = torch.zeros(len(self._counts), int(self._lengths.max()), dtype=torch.int64)
        for head, count in enumerate(self.counts):
            order, fills = self.tail_pages(head, 0)
            pages[head, order] = torch.arange(count).repeat_interleave(fills)
        return pages

    def _heads(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N 1"]:
        return (torch.arange(len(pages)) // (len(pages) // len(self._counts)))[:, None]

    def _edges(
        self, pages: Int64[Tensor, "N P"]
    ) -> tuple[Int64[Tensor, "N P"], Int64[Tensor, "N P"]]:
        """First and stop of each page in the order; zeros for missing pages."""
        if not self._firsts.shape[1]:
            return torch.zeros_like(pages), torch.zeros_like(pages)
        heads, missing = self._heads(pages), pages < 0
        asked = pages.masked_fill(missing, 0)
        last = asked + 1 >= self._counts[heads]
        after = self._firsts[heads, (asked + 1).masked_fill(last, 0)]
        stops = torch.where(last, self._lengths[heads], after)
        firsts = self._firsts[heads, asked]
        return firsts.masked_fill(missing, 0), stops.masked_fill(missing, 0)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._lengths, self._counts, self._order, self._firsts, self._versions)

    def state(self) -> dict[str, Tensor]:
        changed = int((self._versions > 0).sum(1).max())  # no page that ever was has version 0
        return {
            "lengths": self._lengths.clone(),
            "counts": self._counts.clone(),
            "order": trim_table(self._order, max(self.indexed)),
            "firsts": trim_table(self._firsts, max(self.counts)),
            "versions": trim_table(self._versions, changed),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore from the tensors of `state`."""
        self._lengths, self._counts = state["lengths"].clone(), state["counts"].clone()
        self._order, self._firsts = state["order"].clone(), state["firsts"].clone()
        self._versions = state["versions"].clone()


def paginate_clusters(
    points: Float[Tensor, "S D"], count: int, iterations: int, page: int
) -> tuple[Int64[Tensor, " S"], Int64[Tensor, " P"]]:
    """Points in the order of their clusters, and where pages begin in it.

    A cluster larger than a page becomes several pages, equally full.
    """
    _, labels = kmeans(points, count, iterations, ClusterMetric.DIRECTION)
    order = torch.sort(labels, stable=True).indices
    sizes = torch.bincount(labels, minlength=count)
    pieces = (sizes + page - 1) // page
    each = torch.arange(count).repeat_interleave(pieces)
    piece = torch.arange(len(each)) - (pieces.cumsum(0) - pieces)[each]
    firsts = (sizes.cumsum(0) - sizes)[each] + piece * sizes[each] // pieces[each]
    return order, firsts
