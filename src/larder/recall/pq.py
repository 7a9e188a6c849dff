"""Product quantization index (PQCache): entries by products with the codes of their keys.

Zhang et al., "PQCache: Product Quantization-based KVCache for Long Context LLM Inference" (2024),
arXiv:2407.12820: the keys of a kv head are cut into two parts, each part clustered by
k-means into 64; a query's products with all centroids are looked up for every key. Softmax of each
query head, summed over the group; the highest entries are fetched.

Differences: k-means starts from evenly spaced entries and runs a fixed number of iterations, where
the paper runs as many as fit beside the computation. New entries take the nearest centroids, as
in the paper; centroids are recomputed when a head has twice the entries they were made of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.observation import Entries
from larder.core.recall import RecallResult
from larder.core.spec import LayerSpec
from larder.ops.approximate_products import pq_products
from larder.ops.search import top_rows
from larder.recall._index_base import (
    EntryIndex,
    EntryRecall,
    grow_table,
    mask_missing,
    softmax_weights,
    sum_group_weights,
)
from larder.recall._kmeans import ClusterMetric, assign_clusters, kmeans

MAX_CODES = 256  # a code is a byte


@dataclass(frozen=True)
class PQ(EntryRecall):
    """Entries by the attention weights of their quantized keys.

    Args:
        parts: parts of a key, each with a code.
        centroids: centroids per part.
        iterations: k-means iterations.
    """

    parts: int = 2
    centroids: int = 64
    iterations: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.parts >= 1, "pq.parts", "at least 1", self.parts)
        if not 1 <= self.centroids <= MAX_CODES:
            raise BadParameter(f"pq.centroids must be from 1 to {MAX_CODES}, got {self.centroids}.")
        require(self.iterations >= 1, "pq.iterations", "at least 1", self.iterations)

    def index(self, layer: LayerSpec) -> PQIndex:
        if layer.head_dim % self.parts:
            raise BadParameter(
                f"pq.parts must divide the head size of the model, {layer.head_dim}, "
                f"got {self.parts}."
            )
        return PQIndex(layer, self)


class PQIndex(EntryIndex):
    """Index with a byte per part of each key, and the centroids in float32."""

    tables = {"centroids": None, "made_of": None, "codes": 2}

    def __init__(self, layer: LayerSpec, part: PQ) -> None:
        super().__init__(layer)
        self._part = part
        shape = (layer.kv_heads, part.parts, part.centroids, layer.head_dim // part.parts)
        self._centroids = torch.zeros(shape)
        self._made_of = torch.zeros(layer.kv_heads, dtype=torch.int64)
        self._codes = torch.zeros(layer.kv_heads, part.parts, 0, dtype=torch.uint8)

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        self._codes = grow_table(self._codes, max(entries.lengths), dim=2)
        for head, (before, now) in enumerate(zip(indexed, entries.lengths, strict=True)):
            if now >= max(2 * int(self._made_of[head]), 1):
                self._made_of[head] = now
                self._make(head, entries.head_keys(head).float())
            elif now > before:
                self._join(head, entries.keys_from(head, before).float(), before)

    def _make(self, head: int, keys: Float[Tensor, "S D"]) -> None:
        part = self._part
        for p, points in enumerate(keys.chunk(part.parts, dim=1)):
            made = kmeans(
                points.contiguous(), part.centroids, part.iterations, ClusterMetric.DISTANCE
            )
            self._centroids[head, p], self._codes[head, p, : len(keys)] = made

    def _join(self, head: int, keys: Float[Tensor, "S D"], first: int) -> None:
        for p, points in enumerate(keys.chunk(self._part.parts, dim=1)):
            codes = assign_clusters(points, self._centroids[head, p], ClusterMetric.DISTANCE)
            self._codes[head, p, first : first + len(keys)] = codes

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        heads, parts, _, width = self._centroids.shape
        asked = queries.float().view(heads, self.layer.group, parts, width).transpose(1, 2)
        tables = (asked @ self._centroids.transpose(2, 3)).transpose(1, 2)  # [K, R, parts, C]
        indexed = self.paged.indexed
        logits = pq_products(tables * self.layer.scaling, self._codes, max(indexed)).flatten(0, 1)
        return RecallResult(
            top_rows(
                sum_group_weights(softmax_weights(mask_missing(logits, indexed)), indexed), count
            )
        )

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        weights = softmax_weights(self.logits(queries, entries))
        return RecallResult(top_rows(sum_group_weights(weights, self.paged.indexed), count))


Part = PQ
