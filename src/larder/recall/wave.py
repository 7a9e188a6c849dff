"""Wave index (RetroInfer): best clusters fetched, next ones estimated by centroids, rest omitted.

Chen et al., "RetroInfer: A Vector-Storage Approach for Scalable Long-Context LLM Inference" (2025),
arXiv:2505.02922: k-means within segments of the text, over keys less their mean, with centroids of
length 1 during the iterations, about 16 entries to a cluster. Softmax over centroids, summed
over a group, ranks clusters. An estimated cluster counts as many times its centroid as it has
entries, with their mean value. New entries become clusters when there are 1,024 of them;
until then they are pending, and every step attends to them. A shorter text has no clusters.

Differences: k-means starts from evenly spaced entries. A cluster larger than a page is cut into
pages with their own centroids, equally full, in the order of time. Pending entries are in pages of
contiguous entries, which come before all others within the same budget: so no more than
half of what is fetched may be pending, and clusters are made earlier where that is below 1,024.
Centroids are ranked as in the released code: by softmax without their counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.arguments import require, require_at_least
from larder.core.errors import BadParameter
from larder.core.observation import Entries
from larder.core.recall import Estimate, RecallIndex, RecallPart, RecallResult
from larder.core.spec import LayerSpec
from larder.ops.search import page_max_scores, top_rows
from larder.recall._index_base import (
    check_new_entries,
    group_queries,
    grow_table,
    indexed_layout,
    mask_missing,
    softmax_weights,
    sum_group_weights,
    trim_table,
)
from larder.recall._kmeans import ClusterPages, paginate_clusters


class PendingMode(Enum):
    """Search for entries outside any cluster: all of them, or ranked like clusters."""

    EXACT = "exact"
    RANKED = "ranked"


@dataclass(frozen=True)
class Wave(RecallPart):
    """Pages of clusters, and centroids for the next ones.

    Args:
        page: maximum entries of a page.
        size: average entries per cluster.
        segment: maximum entries that are clustered together.
        update: pending entries that make a segment of their own; at most half of `tokens` are
            pending if all of them are attended to.
        pending: `exact` attends to all pending entries at every step, `ranked` to the pages of them
            that rank high enough.
        iterations: k-means iterations.
        estimated: share of all pages that is estimated, in [0, 1].
    """

    page: int = 16
    size: int = 16
    segment: int = 8192
    update: int = 1024
    pending: PendingMode = PendingMode.EXACT
    iterations: int = 10
    estimated: float = 0.232

    is_plain: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(
            1,
            "wave",
            size=self.size,
            segment=self.segment,
            update=self.update,
            iterations=self.iterations,
        )
        if self.segment < self.update:
            raise BadParameter(
                f"wave.segment must be at least wave.update, {self.update}, got {self.segment}."
            )
        require(0 <= self.estimated <= 1, "wave.estimated", "in [0, 1]", self.estimated)

    @property
    def segment_tokens(self) -> int:
        """Number of pending entries at which they become clusters."""
        if self.pending is PendingMode.RANKED or self.tokens is None:
            return self.update
        return min(self.update, max(1, self.pages // 2) * self.page)

    def index(self, layer: LayerSpec) -> RecallIndex:
        return WaveIndex(layer, self)


class WaveIndex(RecallIndex):
    """Index with the entries of each page, and its mean key and value in float32."""

    def __init__(self, layer: LayerSpec, part: Wave) -> None:
        self.layer = layer
        self.page = part.page
        self._part = part
        heads = layer.kv_heads
        self._paged = ClusterPages(heads, part.page)
        self._settled = torch.zeros(heads, 2, dtype=torch.int64)  # entries in clusters, their pages
        self._keys = torch.zeros(heads, 0, layer.head_dim)
        self._values = torch.zeros(heads, 0, layer.head_dim)

    def add(self, entries: Entries, queries: Float[Tensor, "H Q D"] | None = None) -> None:
        indexed = self._paged.indexed
        check_new_entries(entries, indexed, self.layer.index)
        for head, (before, now) in enumerate(zip(indexed, entries.lengths, strict=True)):
            if now > before:
                self._grow(head, entries)

    def _grow(self, head: int, entries: Entries) -> None:
        """Cluster complete segments of pending entries, and paginate the rest."""
        part, now = self._part, entries.lengths[head]
        done, kept = self._settled[head].tolist()
        orders: list[Tensor] = []
        firsts: list[Tensor] = []
        at, pages = done, kept
        update = part.segment_tokens
        while (waiting := (now - at) // update * update) > 0:
            keys = entries.head_keys(head)[at : at + min(waiting, part.segment)].float()
            order, first = self._clusters(keys)
            orders.append(order + at)
            firsts.append(first + at)
            at, pages = at + len(keys), pages + len(first)
        orders.append(torch.arange(at, now))
        firsts.append(torch.arange(at, now, self.page))
        self._settled[head] = torch.tensor([at, pages])
        self._paged.replace(head, kept, done, torch.cat(orders), torch.cat(firsts))
        self._average(head, kept, entries)

    def _clusters(
        self, keys: Float[Tensor, "S D"]
    ) -> tuple[Int64[Tensor, " S"], Int64[Tensor, " P"]]:
        """Entries in cluster order, and where pages begin in it."""
        count = max(len(keys) // self._part.size, 1)
        centered = keys - keys.mean(0)
        return paginate_clusters(centered, count, self._part.iterations, self.page)

    def _average(self, head: int, stale: int, entries: Entries) -> None:
        most = self._paged.width
        self._keys, self._values = grow_table(self._keys, most), grow_table(self._values, most)
        order, fills = self._paged.tail_pages(head, stale)
        for table, rows in (
            (self._keys, entries.head_keys(head)),
            (self._values, entries.head_values(head)),
        ):
            means = torch.segment_reduce(rows[order].float(), "mean", lengths=fills, axis=0)
            table[head, stale : stale + len(fills)] = means

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        centroids = self._keys[:, : max(self.counts)].transpose(1, 2)
        logits = (group_queries(queries, self.layer) @ centroids).flatten(0, 1)
        weights = softmax_weights(mask_missing(logits.mul_(self.layer.scaling), self.counts))
        return self._found(sum_group_weights(weights, self.counts), count)

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        indexed = self._paged.indexed
        logits = page_max_scores(queries, entries.keys, *indexed_layout(entries, indexed))
        mass = sum_group_weights(softmax_weights(logits.mul_(self.layer.scaling)), indexed)
        scores = torch.zeros(len(indexed), max(self.counts))
        scores.scatter_add_(1, self._paged.page_of(), mass.clamp(min=0.0))
        return self._found(mask_missing(scores, self.counts), count)

    def _found(self, scores: Float[Tensor, "K N"], count: int) -> RecallResult:
        if self._part.pending is PendingMode.EXACT:
            pages = torch.arange(scores.shape[1])
            is_pending = pages >= self._settled[:, 1:]
            scores = scores.masked_fill(is_pending & scores.isfinite(), torch.inf)
        next_ones = math.ceil(self._part.estimated * scores.shape[1])
        ranked = top_rows(scores, count + next_ones)
        estimate = self._estimate(ranked[:, count:]) if ranked.shape[1] > count else None
        return RecallResult(ranked[:, :count], estimate)

    def _estimate(self, pages: Int64[Tensor, "K E"]) -> Estimate:
        heads, missing = torch.arange(len(pages))[:, None], pages < 0
        some = pages.clamp(min=0)
        log_counts = self._paged.fills(pages).float().log()  # -inf of none
        keys, values = self._keys[heads, some], self._values[heads, some]
        keys[missing], values[missing] = 0.0, 0.0
        return Estimate(keys, values, log_counts)

    def contents(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P S"]:
        return self._paged.contents(pages)

    def versions(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P"]:
        return self._paged.versions(pages)

    @property
    def counts(self) -> tuple[int, ...]:
        return self._paged.counts

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self._paged.tensors(), self._settled, self._keys, self._values)

    def state(self) -> dict[str, Tensor]:
        most = max(self.counts)
        return {
            **self._paged.state(),
            "settled": self._settled.clone(),
            "keys": trim_table(self._keys, most),
            "values": trim_table(self._values, most),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore from the tensors of `state`."""
        self._paged.restore(state)
        self._settled = state["settled"].clone()
        self._keys, self._values = state["keys"].clone(), state["values"].clone()


Part = Wave
