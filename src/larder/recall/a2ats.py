"""A2ATS index: entries by codes of their keys, which are coded without positions.

He et al., "A2ATS: Retrieval-Based KV Cache Reduction via Windowed Rotary Position Embedding and
Query-Aware Vector Quantization" (2025), arXiv:2502.12665: a distance beyond a window is clipped to
one constant, so that a query rotated by that constant is multiplied with keys before rotation,
whatever their positions, and one codebook serves all of them. The codebook is fitted in the metric
of the queries: k-means of k L, where L is the Cholesky factor of the mean of q q^T, makes the mean
squared error of products small instead of that of keys. The best entries of each query head are
fetched, and the union over the heads of a group is attended to, at true positions.

The scale of the second moment and the ridge under its root are those of the released code.
Differences: codebooks there have 4,096 codes per head and come from another text and from random
tokens; here they are fitted to the text's own offloaded keys and latest queries, which fewer codes
suffice for, and fitted again when a head has twice the entries they were made of. The union is
taken in turns, the best of each query head first, so that it never exceeds `tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from larder.core.arguments import require_at_least
from larder.core.observation import Entries
from larder.core.recall import RecallResult
from larder.core.spec import LayerSpec
from larder.ops.rope import rotate
from larder.ops.search import interleaved, top_rows
from larder.recall._index_base import EntryRecall, group_queries, grow_table, mask_missing
from larder.recall._kmeans import ClusterMetric, assign_clusters, kmeans
from larder.recall._unrotated_keys import UnrotatedIndex, check_rotation

RIDGE = 1e-6  # added to the diagonal of the scaled second moment


@dataclass(frozen=True)
class A2ats(EntryRecall):
    """Entries by the products of a clipped query with the codes of unrotated keys.

    Args:
        codes: most codes of a kv head.
        clip: distance in positions that all entries are taken to be at.
        iterations: k-means iterations.
    """

    codes: int = 512
    clip: int = 2048
    iterations: int = 5

    observed: ClassVar[int] = 256
    observes_unrotated: ClassVar[bool] = True
    follows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, "a2ats", codes=self.codes, iterations=self.iterations)
        require_at_least(0, "a2ats", clip=self.clip)

    def index(self, layer: LayerSpec) -> A2atsIndex:
        """
        Raises:
            CacheError: the rotary embedding of the layer is unknown.
        """
        check_rotation(layer, "a2ats")
        return A2atsIndex(layer, self)


class A2atsIndex(UnrotatedIndex):
    """Index with a code per entry, and per kv head the codebook and the metric it was fitted in."""

    tables = {"roots": None, "centers": None, "made_of": None, "last": None, "codes": 1}

    def __init__(self, layer: LayerSpec, part: A2ats) -> None:
        super().__init__(layer)
        self._part = part
        self._roots = torch.eye(layer.head_dim).repeat(layer.kv_heads, 1, 1)
        self._centers = torch.zeros(layer.kv_heads, 0, layer.head_dim)  # of keys times roots
        self._made_of = torch.zeros(layer.kv_heads, dtype=torch.int64)
        self._codes = torch.zeros(layer.kv_heads, 0, dtype=torch.int32)

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        self._codes = grow_table(self._codes, max(entries.lengths))
        if not int(self._made_of.max()) and queries is not None and queries.shape[1]:
            self._roots = self._metric(queries)
        for head, (before, now) in enumerate(zip(indexed, entries.lengths, strict=True)):
            if now >= max(2 * int(self._made_of[head]), 1):
                self._fit(head, self._metric_keys(head, entries, 0))
            elif now > before:
                points = self._metric_keys(head, entries, before)
                self._codes[head, before:now] = self._nearest_codes(head, points)
        self._note_latest(entries)

    def _metric(self, queries: Float[Tensor, "H Q D"]) -> Float[Tensor, "K D D"]:
        """Cholesky factor of the second moment of the clipped queries of each group.

        Args:
            queries: before rotation.
        """
        clipped = self._clipped(queries.float()).view(self.layer.kv_heads, -1, queries.shape[2])
        clipped = clipped.double()  # of few queries, rounding in float32 exceeds the ridge
        moments = clipped.mT @ clipped  # [K, D, D]
        scale = moments.square().mean((1, 2), keepdim=True).sqrt()
        moments = moments / scale.clamp(min=torch.finfo(torch.float32).tiny)
        moments.diagonal(dim1=1, dim2=2).add_(RIDGE)
        roots: Tensor = torch.linalg.cholesky(moments)  # pyright: ignore
        return roots.float().contiguous()

    def _clipped(self, queries: Float[Tensor, "H Q D"]) -> Float[Tensor, "H Q D"]:
        """Unrotated queries rotated to the clipped distance."""
        at = torch.full((queries.shape[1],), self._part.clip)
        return rotate(queries, at, self._radians)

    def _metric_keys(self, head: int, entries: Entries, first: int) -> Float[Tensor, "S D"]:
        """Keys from entry `first` on, before rotation, times the root of the metric."""
        return self.unrotated_keys(head, entries, first) @ self._roots[head]

    def _fit(self, head: int, points: Float[Tensor, "S D"]) -> None:
        count = min(self._part.codes, len(points))
        made = kmeans(points, count, self._part.iterations, ClusterMetric.DISTANCE)
        missing = max(count - self._centers.shape[1], 0)
        self._centers = pad(self._centers, (0, 0, 0, missing))
        self._centers[head, :count], self._codes[head, : len(points)] = made[0], made[1].int()
        self._made_of[head] = len(points)

    def _nearest_codes(self, head: int, points: Float[Tensor, "S D"]) -> Int64[Tensor, " S"]:
        count = min(self._part.codes, int(self._made_of[head]))
        return assign_clusters(points, self._centers[head, :count], ClusterMetric.DISTANCE)

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        indexed = self.paged.indexed
        clipped = self._clipped(self.unrotated_queries(queries)[:, None])[:, 0]
        grouped = group_queries(clipped, self.layer)  # [K, R, D]
        solved: Tensor = torch.linalg.solve_triangular(  # pyright: ignore
            self._roots, grouped.mT, upper=False
        )
        products = solved.mT @ self._centers.mT  # [K, R, codes]
        codes = self._codes[:, None, : max(indexed)].long().expand(-1, self.layer.group, -1)
        if not products.shape[2]:
            return self.exact(queries, entries, count)
        scores = mask_missing(products.gather(2, codes).flatten(0, 1), indexed)
        return self._union(scores, count)

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        return self._union(self.logits(queries, entries), count)

    def _union(self, scores: Float[Tensor, "H M"], count: int) -> RecallResult:
        return RecallResult(interleaved(top_rows(scores, count), self.layer.kv_heads, count))


Part = A2ats
