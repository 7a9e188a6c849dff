"""Two sizes of pages (LServe): large pages fetched by the bounds of small ones, and kept for steps.

Yang et al., "LServe: Efficient Long-sequence LLM Serving with Unified Sparse Attention" (2025),
arXiv:2502.14866, section 3.5: boxes around all keys of a large page are loose, so a page is as good
as the best of its parts, whose boxes bound products as in Quest; entries are moved in large pages.
Queries of neighboring steps want the same pages, so a choice stands for some steps. The newest page
is always among those fetched. Sizes (64, 16) and 4 steps are those of the released code.

Differences: every query head ranks pages for itself, and those of a kv head are taken in turn
[inferred]. A page that is not full has boxes of its own parts. The other half of LServe, heads that
see the first and latest tokens alone, is `retrieval_heads()` with `park(cut="streaming")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.observation import Entries
from larder.core.recall import RecallPart, RecallResult
from larder.core.spec import LayerSpec
from larder.ops.search import interleaved, top_rows
from larder.recall._index_base import ContiguousIndex, group_queries, grow_table, mask_missing
from larder.recall.bounds import PageSummary, changed_boxes


@dataclass(frozen=True)
class LServe(RecallPart):
    """Pages by the highest bound of their parts, chosen once for some steps.

    Args:
        page: entries of a page.
        part: entries of a part of it, which divide it.
        keep: steps that one choice stands for.
    """

    page: int = 64
    part: int = 16
    keep: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part < 1 or self.page % self.part:
            raise BadParameter(
                f"lserve.part must divide the page of {self.page} entries, got {self.part}."
            )
        require(self.keep >= 1, "lserve.keep", "at least 1 step", self.keep)

    def index(self, layer: LayerSpec) -> LServeIndex:
        return LServeIndex(layer, self)


class LServeIndex(ContiguousIndex):
    """Index with a float32 box per part of a page, and the choice that stands."""

    is_stateless = False  # it stores a choice
    tables: ClassVar = {"boxes": 1, "chosen": None, "course": None}

    def __init__(self, layer: LayerSpec, part: LServe) -> None:
        super().__init__(layer, part.page)
        self._part = part
        self._boxes = torch.zeros(layer.kv_heads, 0, 2 * layer.head_dim)  # highest, then lowest
        self._chosen = torch.zeros(layer.kv_heads, 0, dtype=torch.int64)
        self._course = torch.zeros(2, dtype=torch.int64)  # steps it stands for, pages asked for

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        size = self._part.part
        self._boxes = grow_table(self._boxes, -(-max(entries.lengths) // size))
        for head, first, boxes in changed_boxes(entries, indexed, size, PageSummary.QUEST):
            self._boxes[head, first : first + len(boxes)] = boxes

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        left, asked = self._course.tolist()
        if left < 1 or asked != count or self._lacks_pages(count):
            self._chosen, left = self._choice(self._bounds(queries), count), self._part.keep
        self._course = torch.tensor([left - 1, count])
        return RecallResult(self._chosen.clone())

    def _lacks_pages(self, count: int) -> bool:
        """True if a head has pages that the choice has room for, or whose newest is not in it."""
        pages = torch.tensor(self.counts)
        newest = (self._chosen == pages[:, None] - 1).any(1) | (pages == 0)
        return bool((((self._chosen >= 0).sum(1) < pages.clamp(max=count)) | ~newest).any())

    def _bounds(self, queries: Float[Tensor, "H D"]) -> Float[Tensor, "H P"]:
        """Upper bound of the products with the keys of each page."""
        grouped, size = group_queries(queries, self.layer), self._part.part
        sides = torch.cat([grouped.clamp(min=0), grouped.clamp(max=0)], dim=2)  # [K, R, 2D]
        parts = tuple(-(-length // size) for length in self.paged.indexed)
        bounds = (sides @ self._boxes[:, : max(parts)].transpose(1, 2)).flatten(0, 1)
        bounds = mask_missing(bounds, parts)
        each = self.page // size
        missing = max(self.counts) * each - bounds.shape[1]
        return pad(bounds, (0, missing), value=-torch.inf).view(len(bounds), -1, each).amax(2)

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        scores = self.page_scores(queries, entries)
        return RecallResult(self._choice(mask_missing(scores, self.counts), count))

    def _choice(self, bounds: Float[Tensor, "H N"], count: int) -> Int64[Tensor, "K P"]:
        """Newest page of every kv head, and the best page of each of its query heads in turn."""
        newest = torch.tensor(self.counts).repeat_interleave(self.layer.group)[:, None] - 1
        is_newest = torch.arange(bounds.shape[1]) == newest
        ranked = top_rows(bounds.masked_fill(is_newest, torch.inf), count)
        return interleaved(ranked, self.layer.kv_heads, count)

    def _table_length(self, name: str) -> int:
        return -(-max(self.paged.indexed) // self._part.part)


Part = LServe
