"""Cluster index (ClusterKV): whole clusters of keys by centroid product, until the budget is full.

Liu et al., "ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression"
(2024), arXiv:2412.03213: the keys of a kv head are clustered by cosine, centroids are
the means of their keys; each query head ranks them by product and takes their entries, cluster by
cluster, until its budget is full; the last cluster is trimmed.

Differences: k-means starts from evenly spaced entries and runs a fixed number of iterations. New
entries join the cluster of the nearest centroid, where the paper makes a few new clusters of every
320 new ones; when a head has twice the entries that its clusters were made of, it is clustered
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import Entries
from larder.core.recall import RecallResult
from larder.core.spec import LayerSpec
from larder.recall._index_base import (
    EntryIndex,
    EntryRecall,
    group_queries,
    grow_table,
    mask_missing,
)
from larder.recall._kmeans import ClusterMetric, assign_clusters, kmeans


@dataclass(frozen=True)
class Clusters(EntryRecall):
    """Entries of the clusters whose centroids have the largest products.

    Args:
        size: average entries per cluster when the clusters are made.
        iterations: k-means iterations.
    """

    size: int = 80
    iterations: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.size >= 1, "clusters.size", "at least 1 entry", self.size)
        require(self.iterations >= 1, "clusters.iterations", "at least 1", self.iterations)

    def index(self, layer: LayerSpec) -> ClustersIndex:
        return ClustersIndex(layer, self)


class ClustersIndex(EntryIndex):
    """Index with the cluster of each entry, entries in cluster order, and the centroids."""

    tables = {"made_of": None, "made": None, "centroids": 1, "labels": 1}

    def __init__(self, layer: LayerSpec, part: Clusters) -> None:
        super().__init__(layer)
        self._part = part
        heads = layer.kv_heads
        self._made_of = torch.zeros(heads, dtype=torch.int64)
        self._made = torch.zeros(heads, dtype=torch.int64)  # clusters of each head
        self._centroids = torch.zeros(heads, 0, layer.head_dim)
        self._sizes = torch.zeros(heads, 0, dtype=torch.int64)
        self._labels = torch.zeros(heads, 0, dtype=torch.int32)
        self._order = torch.zeros(heads, 0, dtype=torch.int32)

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        longest = max(entries.lengths)
        self._labels, self._order = (
            grow_table(self._labels, longest),
            grow_table(self._order, longest),
        )
        for head, (before, now) in enumerate(zip(indexed, entries.lengths, strict=True)):
            if now == before:
                continue
            if now >= max(2 * int(self._made_of[head]), 1):
                self._cluster(head, entries.head_keys(head).float())
            else:
                self._assign(head, entries.keys_from(head, before).float(), before)
            self._sort(head, now)

    def _cluster(self, head: int, keys: Float[Tensor, "S D"]) -> None:
        count = max(len(keys) // self._part.size, 1)
        self._centroids, self._sizes = (
            grow_table(self._centroids, count),
            grow_table(self._sizes, count),
        )
        made = kmeans(keys, count, self._part.iterations, ClusterMetric.COSINE)
        self._centroids[head, :count], self._labels[head, : len(keys)] = made
        self._made_of[head], self._made[head] = len(keys), count

    def _assign(self, head: int, keys: Float[Tensor, "S D"], first: int) -> None:
        centroids = self._centroids[head, : int(self._made[head])]
        labels = assign_clusters(keys, centroids, ClusterMetric.COSINE)
        self._labels[head, first : first + len(keys)] = labels

    def _sort(self, head: int, length: int) -> None:
        """Order entries by cluster, then by number."""
        labels = self._labels[head, :length].numpy()
        if int(self._made[head]) <= 1 << 16:
            labels = labels.astype(np.uint16)  # sorted by radix
        self._order[head, :length] = torch.from_numpy(np.argsort(labels, kind="stable"))
        counts = np.bincount(labels, minlength=self._sizes.shape[1])
        self._sizes[head] = torch.from_numpy(counts)

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        grouped = group_queries(queries, self.layer)
        scores = (grouped @ self._centroids.transpose(1, 2)).flatten(0, 1)
        scores = mask_missing(scores, tuple(self._made.tolist()))
        return RecallResult(self._members(_rank_clusters(scores), min(count, max(self.counts))))

    def _members(self, ranked: Int64[Tensor, "H C"], count: int) -> Int64[Tensor, "H P"]:
        """First `count` entries of the ranked clusters, cluster by cluster."""
        sizes = self._sizes.repeat_interleave(self.layer.group, 0)
        firsts = (sizes.cumsum(1) - sizes).gather(1, ranked)  # in `order`, by rank
        sizes = sizes.gather(1, ranked)
        ends = sizes.cumsum(1)
        slots = torch.arange(count).expand(len(ranked), -1).contiguous()
        rank = torch.searchsorted(ends, slots, right=True)
        beyond = rank == ranked.shape[1]
        rank = rank.clamp(max=ranked.shape[1] - 1)
        indices = slots - (ends - sizes).gather(1, rank) + firsts.gather(1, rank)
        heads = torch.arange(len(ranked)) // self.layer.group
        found = self._order[heads[:, None], indices.masked_fill(beyond, 0)].long()
        return found.masked_fill(beyond, -1)

    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors(), self._sizes, self._order)

    def _table_length(self, name: str) -> int:
        return int(self._made.max()) if name == "centroids" else max(self.counts)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self._sizes = torch.zeros(self._centroids.shape[:2], dtype=torch.int64)
        self._order = torch.zeros_like(self._labels)
        for head, length in enumerate(self.paged.indexed):
            if length:
                self._sort(head, length)


def _rank_clusters(scores: Float[Tensor, "H C"]) -> Int64[Tensor, "H C"]:
    """Clusters by descending score; ties go to the lower number, missing clusters come last."""
    return torch.sort(scores, dim=1, descending=True, stable=True).indices


Part = Clusters
