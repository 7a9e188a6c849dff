"""Sentences by the product of the query with their mean key.

Zhu et al., "SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching" (2025),
arXiv:2504.00970: texts are cut at punctuation, each head keeps the mean key of every
sentence, sentences are ranked for every query head and their tokens taken, sentence after
sentence.

What differs: the paper ranks by the mean of the queries since the last punctuation, here the newest
query ranks alone; its first cut of the text by attention is a scorer's work. A sentence longer than
a page is cut into pages with a mean each. Where the cache keeps no `sentence` column, pages are of
consecutive entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.observation import Entries
from larder.core.recall import Found, Index, Recall
from larder.core.spec import LayerSpec
from larder.ops.search import bests_by_page, page_bests, top_rows
from larder.recall._coming import check_coming, known_layout
from larder.recall._entries import by_group, only_owned
from larder.recall._growing import fitting, grown

COLUMN = "sentence"


@dataclass(frozen=True)
class Sentences(Recall):
    """Sentences, by their mean keys.

    Args:
        page: the most entries that are one sentence.
    """

    page: int = 32

    tallies: ClassVar[frozenset[str]] = frozenset({"sentence"})

    def index(self, layer: LayerSpec) -> Index:
        return SentencesIndex(layer, self.page)

    def adopt(self, layer: LayerSpec, state: Mapping[str, Tensor]) -> Index:
        index = SentencesIndex(layer, self.page)
        index.restore(state)
        return index


class SentencesIndex(Index):
    """Holds where each sentence begins, and its mean key in float32.

    A page holds entries that follow each other, so its fill tells how often it changed.
    """

    def __init__(self, layer: LayerSpec, page: int) -> None:
        self.layer = layer
        self.page = page
        heads = layer.kv_heads
        self._lengths = torch.zeros(heads, dtype=torch.int64)
        self._counts = torch.zeros(heads, dtype=torch.int64)
        self._firsts = torch.zeros(heads, 0, dtype=torch.int64)
        self._means = torch.zeros(heads, 0, layer.head_dim)
        # Of each head's last sentence: its number, and how many of its entries came so far.
        self._open = torch.zeros(heads)
        self._come = torch.zeros(heads, dtype=torch.int64)

    def add(self, entries: Entries, queries: Float[Tensor, "H Q D"] | None = None) -> None:
        known = tuple(self._lengths.tolist())
        check_coming(entries, known, self.layer.index)
        for head, (before, now) in enumerate(zip(known, entries.lengths, strict=True)):
            if now > before:
                stale = max(int(self._counts[head]) - 1, 0)
                self._cut(head, self._numbers(entries, head, before), before)
                self._average(head, stale, entries)
        self._lengths = torch.tensor(entries.lengths)

    def _numbers(self, entries: Entries, head: int, first: int) -> Float[Tensor, " S"]:
        """The sentence of each entry that comes; the end of one still belongs to it."""
        if COLUMN in entries.columns:
            return entries.columns[COLUMN][entries.rows(head)][first:].abs()
        return torch.zeros(entries.lengths[head] - first)

    def _cut(self, head: int, numbers: Float[Tensor, " S"], first: int) -> None:
        """Note where pages begin: at every new sentence, and wherever one is full."""
        places = torch.arange(len(numbers))
        begins = torch.ones(len(numbers), dtype=torch.bool)
        begins[1:] = numbers[1:] != numbers[:-1]
        come = 0
        if first and numbers[0] == self._open[head]:
            come, begins[0] = int(self._come[head]), False
        run = torch.where(begins, places, -come).cummax(0).values
        since = places - run  # entries of the same sentence before each
        found = first + torch.nonzero(since % self.page == 0).flatten()
        count = int(self._counts[head])
        self._firsts = grown(self._firsts, count + len(found))
        self._firsts[head, count : count + len(found)] = found
        self._counts[head] = count + len(found)
        self._open[head], self._come[head] = numbers[-1], int(since[-1]) + 1

    def _average(self, head: int, stale: int, entries: Entries) -> None:
        """The means of the new pages, and of the one before, which may have grown."""
        count, length = int(self._counts[head]), entries.lengths[head]
        self._means = grown(self._means, self._firsts.shape[1])
        edges = torch.cat([self._firsts[head, stale:count], torch.tensor([length])])
        keys = entries.keys_from(head, int(edges[0])).float()
        means = torch.segment_reduce(keys, "mean", lengths=edges.diff(), axis=0)
        self._means[head, stale:count] = means

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> Found:
        means = self._means[:, : max(self.counts)].transpose(1, 2)
        scores = (by_group(queries, self.layer) @ means).flatten(0, 1)
        return Found(top_rows(only_owned(scores, self.counts), count))

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> Found:
        known = tuple(self._lengths.tolist())
        page_of = torch.full((len(known), max(known)), -1)
        for head, (length, pages) in enumerate(zip(known, self.counts, strict=True)):
            own = self._firsts[head, :pages].contiguous()
            page_of[head, :length] = torch.searchsorted(own, torch.arange(length), right=True) - 1
        scores = page_bests(queries, entries.keys, *known_layout(entries, known))
        return Found(top_rows(bests_by_page(scores, page_of, max(self.counts)), count))

    def contents(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P S"]:
        firsts, stops = self._edges(pages)
        numbers = firsts[..., None] + torch.arange(self.page)
        return numbers.masked_fill(numbers >= stops[..., None], -1)

    def versions(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P"]:
        firsts, stops = self._edges(pages)
        return stops - firsts

    def _edges(
        self, pages: Int64[Tensor, "N P"]
    ) -> tuple[Int64[Tensor, "N P"], Int64[Tensor, "N P"]]:
        """First entry of each page, and where it stops; zeros where there is none."""
        heads = (torch.arange(len(pages)) // (len(pages) // self.layer.kv_heads))[:, None]
        missing = pages < 0
        asked = pages.masked_fill(missing, 0)
        if not self._firsts.shape[1]:
            return torch.zeros_like(pages), torch.zeros_like(pages)
        last = asked + 1 >= self._counts[heads]
        after = self._firsts[heads, (asked + 1).masked_fill(last, 0)]
        stops = torch.where(last, self._lengths[heads], after)
        firsts = self._firsts[heads, asked]
        return firsts.masked_fill(missing, 0), stops.masked_fill(missing, 0)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(self._counts.tolist())

    def tensors(self) -> tuple[Tensor, ...]:
        tables = (self._firsts, self._means, self._open, self._come)
        return (self._lengths, self._counts, *tables)

    def state(self) -> dict[str, Tensor]:
        most = max(self.counts)
        return {
            "lengths": self._lengths.clone(),
            "counts": self._counts.clone(),
            "firsts": fitting(self._firsts, most).clone(),
            "means": fitting(self._means, most).clone(),
            "open": self._open.clone(),
            "come": self._come.clone(),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Become the index that `state` came from."""
        self._lengths, self._counts = state["lengths"].clone(), state["counts"].clone()
        self._firsts, self._means = state["firsts"].clone(), state["means"].clone()
        self._open, self._come = state["open"].clone(), state["come"].clone()


Part = Sentences
