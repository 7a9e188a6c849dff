"""MPCache index: coarse-to-fine search over contiguous pages by one product per page.

Zeng et al., "MPCache: MPC-Friendly KV Cache Eviction for Efficient Private Large Language Model
Inference" (2025), arXiv:2501.06807: neighboring tokens are clusters, and each is summarized by a
point between its largest and smallest numbers, 0.6 of the way up, whose product with the query is
linear and approximates the bound of its contents. Coarse clusters narrow the search, fine ones
within them are ranked.

Sizes are those of the released code: clusters of 32 and of 16, half of the coarse ones are kept,
and the point is 0.6 of the way up.

Two neighboring layers share the selection of the first of them, all but the first two. That takes
layers that offloaded the same tokens; if a scorer makes a first cut of the text, have the pair
share its scores too: `token(layers=2)`.

Differences: the paper's first cut of the text is a scorer's work. At least as many coarse
clusters are kept as hold the requested pages; the code requests a fifth of all that is left. All
fine points are multiplied at once, which on ordinary hardware is quicker than gathering some, and
those outside the coarse clusters are masked. Every query head selects for itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import Entries
from larder.core.recall import RecallIndex, RecallPart, RecallResult
from larder.core.spec import LayerSpec
from larder.ops.search import top_rows
from larder.recall._index_base import ContiguousIndex, group_queries, grow_table, mask_missing
from larder.recall.bounds import PageSummary, changed_boxes


@dataclass(frozen=True)
class MPCache(RecallPart):
    """Pages of contiguous entries, by a point in their box, coarse to fine.

    Args:
        page: entries of a page.
        coarse: pages of a coarse cluster.
        kept: share of coarse clusters that are kept, in (0, 1].
        slant: height of the point between lowest and highest, in [0, 1].
        alone: number of first offloading layers that share no selection.
    """

    layers: int = 2
    page: int = 16
    coarse: int = 2
    kept: float = 0.5
    slant: float = 0.6
    alone: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.coarse >= 1, "mpcache.coarse", "at least 1 page", self.coarse)
        require(0 < self.kept <= 1, "mpcache.kept", "in (0, 1]", self.kept)
        require(self.alone >= 0, "mpcache.alone", "at least 0 layers", self.alone)
        require(0 <= self.slant <= 1, "mpcache.slant", "in [0, 1]", self.slant)

    def leader_of(self, index: int) -> int:
        return index if index < self.alone else index - (index - self.alone) % self.layers

    def index(self, layer: LayerSpec) -> RecallIndex:
        return MPCacheIndex(layer, self)


class MPCacheIndex(ContiguousIndex):
    """Index with a float32 point per page and one per coarse cluster."""

    tables = {"fine": 1, "coarse": 1}

    def __init__(self, layer: LayerSpec, part: MPCache) -> None:
        super().__init__(layer, part.page)
        self._part = part
        self._fine = torch.zeros(layer.kv_heads, 0, layer.head_dim)
        self._coarse = torch.zeros(layer.kv_heads, 0, layer.head_dim)

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        self._fine = self._points(self._fine, entries, indexed, self.page)
        self._coarse = self._points(self._coarse, entries, indexed, self.page * self._part.coarse)

    def _points(
        self, table: Float[Tensor, "K P D"], entries: Entries, indexed: tuple[int, ...], size: int
    ) -> Float[Tensor, "K L D"]:
        """Table with the points of all clusters that are new or have grown."""
        table = grow_table(table, -(-max(entries.lengths) // size))
        for head, first, boxes in changed_boxes(entries, indexed, size, PageSummary.QUEST):
            highest, lowest = boxes.chunk(2, dim=1)
            points = torch.lerp(lowest, highest, self._part.slant)
            table[head, first : first + len(points)] = points
        return table

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        grouped, pages = group_queries(queries, self.layer), max(self.counts)
        fine = (grouped @ self._fine[:, :pages].transpose(1, 2)).flatten(0, 1)
        stays = self._stays(grouped, count).repeat_interleave(self._part.coarse, 1)[:, :pages]
        return RecallResult(
            top_rows(mask_missing(fine.masked_fill(~stays, -torch.inf), self.counts), count)
        )

    def _stays(self, queries: Float[Tensor, "K R D"], count: int) -> Bool[Tensor, "H C"]:
        """Mask of the coarse clusters that each query head searches."""
        owned = tuple(-(-pages // self._part.coarse) for pages in self.counts)
        scores = (queries @ self._coarse[:, : max(owned)].transpose(1, 2)).flatten(0, 1)
        least = -(-count // self._part.coarse) + 1  # the last one may not be full
        kept = [max(math.ceil(self._part.kept * each), least) for each in owned]
        ranked = top_rows(mask_missing(scores, owned), max(kept))
        allowed = torch.tensor(kept).repeat_interleave(self.layer.group)[:, None]
        ranked = ranked.masked_fill(torch.arange(ranked.shape[1]) >= allowed, -1)
        stays = torch.zeros(len(scores), max(owned) + 1, dtype=torch.bool)
        return stays.scatter_(1, ranked + 1, True)[:, 1:]

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        return RecallResult(top_rows(self.page_scores(queries, entries), count))

    def _table_length(self, name: str) -> int:
        most = super()._table_length(name)
        return -(-most // self._part.coarse) if name == "coarse" else most


Part = MPCache
