"""Page bounds index (Quest, ArkVale): upper bounds of products from a box around each page's keys.

`digest="quest"`, Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM
Inference" (2024), arXiv:2406.10774: a page's smallest and largest number of every channel bound any
product with its keys; every query head takes the pages of its highest bounds, as in the released
evaluation. `digest="arkvale"`, Chen et al., "ArkVale: Efficient Generative LLM Inference with
Recallable Key-Value Eviction" (2024), NeurIPS 2024, has a tighter box: around the middle of each
channel, by the mean distance from it, which bounds most keys and not all; the mean over all query
heads selects one set for the layer, of pages of 32.

Differences: a partial last page has a box of its own and competes, and both select any number of
pages (Quest takes no fewer than three).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from larder.core.observation import Entries
from larder.core.recall import RecallPart, RecallResult
from larder.core.spec import LayerSpec
from larder.recall._index_base import (
    ContiguousIndex,
    QueryHeadRule,
    group_queries,
    grow_table,
    mask_missing,
    select_pages,
)


class PageSummary(Enum):
    """Box of a page: bounds of all of its keys, or of most of them."""

    QUEST = "quest"
    ARKVALE = "arkvale"


HEAD_RULES = {PageSummary.QUEST: QueryHeadRule.OWN, PageSummary.ARKVALE: QueryHeadRule.LAYER_MEAN}


@dataclass(frozen=True)
class Bounds(RecallPart):
    """Pages of contiguous entries, by the highest product that their box allows.

    Args:
        page: entries of a page; ArkVale's are 32.
        digest: box and query head rule.
    """

    page: int = 16
    digest: PageSummary = PageSummary.QUEST

    def index(self, layer: LayerSpec) -> BoundsIndex:
        return BoundsIndex(layer, self)


class BoundsIndex(ContiguousIndex):
    """Index with a float32 box per page: two numbers per channel."""

    tables = {"boxes": 1}

    def __init__(self, layer: LayerSpec, part: Bounds) -> None:
        super().__init__(layer, part.page)
        self._kind = part.digest
        self._boxes = torch.zeros(layer.kv_heads, 0, 2 * layer.head_dim)  # highest, then lowest

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        self._boxes = grow_table(self._boxes, -(-max(entries.lengths) // self.page))
        for head, first, boxes in changed_boxes(entries, indexed, self.page, self._kind):
            self._boxes[head, first : first + len(boxes)] = boxes

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        grouped = group_queries(queries, self.layer)
        sides = torch.cat([grouped.clamp(min=0), grouped.clamp(max=0)], dim=2)  # [K, R, 2D]
        pages = max(self.counts)
        scores = (sides @ self._boxes[:, :pages].transpose(1, 2)).flatten(0, 1)
        return self._best_pages(mask_missing(scores, self.counts), count)

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        return self._best_pages(self.page_scores(queries, entries), count)

    def _best_pages(self, scores: Float[Tensor, "H P"], count: int) -> RecallResult:
        return RecallResult(
            select_pages(scores, self.layer.kv_heads, HEAD_RULES[self._kind], count)
        )


def changed_boxes(
    entries: Entries, indexed: tuple[int, ...], page: int, kind: PageSummary
) -> Iterator[tuple[int, int, Float[Tensor, "P E"]]]:
    """Kv head, first page and boxes of the pages that entries after the known ones change."""
    for head, (before, now) in enumerate(zip(indexed, entries.lengths, strict=True)):
        if now > before:
            first = before // page
            yield (
                head,
                first,
                bounding_boxes(entries.keys_from(head, first * page).float(), page, kind),
            )


def bounding_boxes(
    keys: Float[Tensor, "S D"], page: int, kind: PageSummary
) -> Float[Tensor, "P E"]:
    """Box of each page of some keys; the last page may be partial."""
    missing = -len(keys) % page
    highest = _pad_pages(keys, page, missing, -torch.inf).amax(1)
    lowest = _pad_pages(keys, page, missing, torch.inf).amin(1)
    if kind is PageSummary.QUEST:
        return torch.cat([highest, lowest], dim=1)
    middle = (highest + lowest) / 2
    away = (_pad_pages(keys, page, missing, 0.0) - middle[:, None]).abs()
    away[-1, page - missing :] = 0.0
    held = torch.full((len(middle), 1), page)
    held[-1] -= missing
    radius = away.sum(1) / held
    return torch.cat([middle + radius, middle - radius], dim=1)


def _pad_pages(
    keys: Float[Tensor, "S D"], page: int, missing: int, filling: float
) -> Float[Tensor, "P L D"]:
    filled = pad(keys, (0, 0, 0, missing), value=filling)
    return filled.view(-1, page, keys.shape[1])


Part = Bounds
