"""Sentence index (SentenceKV): sentences by product of mean key and mean query of the current one.

Zhu et al., "SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching" (2025),
arXiv:2504.00970: texts are cut at punctuation, and each head keeps the mean key of every sentence.
A step searches with the mean of the queries since the last punctuation, its own included. Sentences
are ranked by their products with it, and entries taken sentence by sentence until the budget is
full. The first token of a sentence has no such mean: it attends to all offloaded entries,
beyond the budget, which the first cut of the text (`park(cut="budgets")`) bounds.

Differences: a score is the sum of products over the query heads of a kv head, where the released
code repeats kv heads and ranks for every query head. Means are over offloaded entries, and an entry
that is offloaded while its sentence continues is searchable at once. A sentence that exceeds the
budget is trimmed. If the cache keeps no `sentence` column, 32 contiguous entries are a sentence,
and only the first token after a text attends to everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.observation import Entries
from larder.core.recall import FetchMode, RecallResult
from larder.core.spec import LayerSpec
from larder.ops.search import top_rows
from larder.recall._index_base import (
    EntryIndex,
    EntryRecall,
    group_queries,
    grow_table,
    mask_missing,
)

COLUMN = "sentence"
DEFAULT_SENTENCE_ENTRIES = 32  # entries of a sentence without the sentence column
NO_POSITION = -2  # a position without successor


@dataclass(frozen=True)
class Sentences(EntryRecall):
    """Entries of the sentences most similar to the one being generated.

    Raises:
        BadParameter: pages are prefetched, with predicted queries that no mean may include.
    """

    is_plain: ClassVar[bool] = False
    follows: ClassVar[bool] = True
    tallies: ClassVar[frozenset[str]] = frozenset({"sentence"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fetch is not FetchMode.IN_TURN:
            raise BadParameter(
                f"sentences.fetch must be in_turn, got {self.fetch.value}: predicted queries of a "
                "prefetch are no part of a sentence."
            )

    def index(self, layer: LayerSpec) -> SentencesIndex:
        return SentencesIndex(layer)


class SentencesIndex(EntryIndex):
    """Index with the sentence of each entry, sums of keys, and the mean query in float32."""

    is_stateless = False  # it sums the queries since the last punctuation
    tables = {
        "labels": 1,
        "sizes": None,
        "numbers": 1,
        "counts": 1,
        "sums": 1,
        "asked": None,
        "course": None,
    }

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        heads = layer.kv_heads
        self._labels = torch.zeros(heads, 0, dtype=torch.int64)  # the sentence of each entry
        self._sizes = torch.zeros(heads, dtype=torch.int64)  # sentences of each head
        self._numbers = torch.zeros(heads, 0)  # theirs in the column, in the order of the text
        self._counts = torch.zeros(heads, 0)
        self._sums = torch.zeros(heads, 0, layer.head_dim)
        self._asked = torch.zeros(layer.query_heads, layer.head_dim)
        self._course = torch.tensor([0, NO_POSITION])  # queries in that sum, position of the latest

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        self._labels = grow_table(self._labels, max(entries.lengths))
        for head, (before, now) in enumerate(zip(indexed, entries.lengths, strict=True)):
            if now > before:
                self._insert(head, entries, before)

    def _insert(self, head: int, entries: Entries, before: int) -> None:
        """Relabel the entries of a head, and add those from `before` on to their sentences."""
        column = self._column(entries, head)
        numbers, labels = column.unique(return_inverse=True)
        size, old = len(numbers), int(self._sizes[head])
        indices = torch.searchsorted(numbers, self._numbers[head, :old].contiguous())
        counts, sums = torch.zeros(size), torch.zeros(size, self.layer.head_dim)
        counts[indices], sums[indices] = self._counts[head, :old], self._sums[head, :old]
        fresh = labels[before:]
        counts += torch.bincount(fresh, minlength=size)
        sums.index_add_(0, fresh, entries.keys_from(head, before).float())
        self._numbers, self._counts = (
            grow_table(self._numbers, size),
            grow_table(self._counts, size),
        )
        self._sums = grow_table(self._sums, size)
        self._numbers[head, :size], self._counts[head, :size] = numbers, counts
        self._sums[head, :size] = sums
        self._labels[head, : len(labels)] = labels
        self._sizes[head] = size

    def _column(self, entries: Entries, head: int) -> Float[Tensor, " S"]:
        """Sentence of each entry; an end of sentence belongs to its sentence."""
        if COLUMN in entries.columns:
            return entries.columns[COLUMN][entries.rows(head)].abs()
        return (torch.arange(entries.lengths[head]) // DEFAULT_SENTENCE_ENTRIES).float()

    def observe_step(
        self,
        queries: Float[Tensor, "H D"],
        stays: Entries,
        before: Float[Tensor, "H Q D"] | None = None,
    ) -> None:
        count, latest = self._course.tolist()
        position = int(stays.head_positions(0)[-1])
        if latest != position - 1 or _has_ended(stays, latest):
            count = 0
        self._asked = queries.float() + (self._asked if count else 0.0)
        self._course = torch.tensor([count + 1, position])

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        means = self._sums / self._counts.clamp(min=1)[..., None]  # [K, M, D]
        grouped = group_queries(self._mean_query(queries), self.layer).sum(1)  # [K, D]
        products = torch.einsum("kmd,kd->km", means, grouped)
        scores = products.gather(1, self._labels[:, : max(self.paged.indexed)])
        return self._result(scores, count)

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        logits = self.logits(self._mean_query(queries), entries)
        return self._result(logits.view(self.layer.kv_heads, self.layer.group, -1).sum(1), count)

    def _mean_query(self, queries: Float[Tensor, "H D"]) -> Float[Tensor, "H D"]:
        """Mean query of the sentence; `queries` before the first followed step."""
        count = int(self._course[0])
        return self._asked / count if count else queries

    def _result(self, scores: Float[Tensor, "K M"], count: int) -> RecallResult:
        best = top_rows(mask_missing(scores, self.paged.indexed), count)
        return RecallResult(best, attends_all=int(self._course[0]) == 1)

    def _table_length(self, name: str) -> int:
        return max(self.paged.indexed) if name == "labels" else int(self._sizes.max())


def _has_ended(stays: Entries, position: int) -> bool:
    """True if the token at a position, the last but one, ends a sentence, in any head."""
    if COLUMN not in stays.columns:
        return False
    for head, length in enumerate(stays.lengths):
        if length < 2 or int(stays.head_positions(head)[-2]) != position:
            continue
        if float(stays.columns[COLUMN][stays.rows(head)][-2]) < 0:
            return True
    return False


Part = Sentences
