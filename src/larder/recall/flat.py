"""Exact search over all offloaded keys: the baseline that other indexes are measured against.

No paper; "Exact-TopK" in Mao, Yuzhen et al., "IceCache" and the oracle of most others. It misses
nothing, and every step reads all keys once.

To write another index over contiguous pages, subclass `ContiguousIndex` (`_index_base.py`), which
validates new entries and tracks numbers and versions of pages; implement `_extend` and `find`, and
name in `tables` what it holds. Query head rules are in `_index_base.py`, the
search itself in `larder.ops.search`.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Entries
from larder.core.recall import RecallIndex, RecallPart, RecallResult
from larder.core.spec import LayerSpec
from larder.recall._index_base import ContiguousIndex, QueryHeadRule, select_pages


@dataclass(frozen=True)
class Flat(RecallPart):
    """Pages of contiguous entries, by the best key in each.

    Args:
        page: entries of a page; 1 finds single entries.
        heads: query head rule.
    """

    page: int = 1
    heads: QueryHeadRule = QueryHeadRule.INTERLEAVED

    def index(self, layer: LayerSpec) -> RecallIndex:
        return FlatIndex(layer, self.page, self.heads)


class FlatIndex(ContiguousIndex):
    """Index without tables: it stores only the number of entries."""

    def __init__(self, layer: LayerSpec, page: int, heads: QueryHeadRule) -> None:
        super().__init__(layer, page)
        self._heads = heads

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        scores = self.page_scores(queries, entries)
        return RecallResult(select_pages(scores, self.layer.kv_heads, self._heads, count))

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        return self.find(queries, entries, count)


Part = Flat
