"""Prioritized DCI tree of keys, whose leaves are pages: the index of IceCache.

Mao, Wang, Ester, Li, "IceCache: Memory-efficient KV-cache Management for Long-Sequence LLMs"
(2026), arXiv:2604.10539, sections 2 and D. Keys are lifted to [k / c, sqrt(1 - |k|^2 / c^2)],
so that the key nearest to [q / |q|, 0] is the one with the largest product. Every entry is on
one level of a tree; its parent is the nearest entry of the level above, and entries with one parent
are a cell. The entries of a cell, sorted along one random direction, are divided evenly into pages.
A search descends from the top and scores every entry of the best cells of each level; a page ranks
by the best of its entries that was scored, on whatever level.

    variant   levels                    cells of a level      judged by        pages of
    paper     at random, one ratio      as code               their entry      each query head
    code      counted, 0.01 then 0.2    max(30, 0.0015 n)     their entry      a kv head
    larder    counted, 1/32 then 0.2    max(24, 0.5 n^0.5)    their mean       a kv head

Pages of a kv head are those of its query heads, interleaved. If each query head has its own
pages, as many as the budget allows, the slots take R times the memory, which is counted. The paper
gives neither its ratio nor its search width. The width of the released code grows with n, and
its cells have 100 entries: from 20,000 on it scores 15 % of all keys. Ours are small, and the
8-bit mean of all entries under a cell predicts its contents better than one entry does.

Differences from paper and code in every variant: c is 1.05 times the largest norm of the keys that
the tree was built of. A longer key that comes later is lifted to [k / c, 0], outside of the sphere,
and its parent is still the nearest entry; the order of its products with queries is exact anyway.
A tree is built again at twice the entries it was built of; where entries come one by one, at two
to three times, another length in each tree of a model, so that no step builds many. Until then the
tree gets no higher, means stay, and a new entry takes no children from others. Inside a visited
cell every entry is scored; the code stops at 80 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.observation import Entries
from larder.core.recall import KeyTrees, RecallIndex, RecallPart, RecallResult
from larder.core.spec import LayerSpec
from larder.core.types import Variant
from larder.ops import dci
from larder.ops.search import interleaved, page_max_scores, scatter_page_max, top_rows
from larder.recall._dci_build import LevelAssigner, build_tree
from larder.recall._dci_forest import Array, DciForest
from larder.recall._index_base import check_new_entries, indexed_layout

MARGIN = 1.05  # of the radius, over the largest norm
GROWTH = 2  # times the entries that a tree was built of: it is built again
MAX_STEP_ENTRIES = 64  # new entries of a head in a decode step, and not of a text that is read
GOLDEN_RATIO = (5**0.5 - 1) / 2  # its multiples modulo 1 are spread evenly
PARENT_BEAM = 16  # cells of each level that are searched for the parent of a new entry


@dataclass(frozen=True)
class Dci(RecallPart):
    """DCI tree per kv head.

    Args:
        page: maximum entries of a page.
        variant: see the table above.
        first, further: size ratio of level 1 to level 0, and of each level to the next above; 0 for
            the variant's.
        beam: cells of each level that a search visits; 0 for the variant's.
        seed: of the direction, and of random levels.
    """

    page: int = 16
    variant: Variant = Variant.LARDER
    first: float = 0.0
    further: float = 0.0
    beam: int = 0
    seed: int = 0

    ratios: ClassVar[Mapping[Variant, tuple[float, float]]] = {
        Variant.LARDER: (1 / 32, 0.2),
        Variant.CODE: (0.01, 0.2),
        Variant.PAPER: (0.03, 0.03),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, ratio in (("first", self.first), ("further", self.further)):
            if not 0 <= ratio <= 0.5:
                raise BadParameter(f"dci.{name} must lie in (0, 0.5], or be 0, got {ratio}.")
        require(self.beam >= 0, "dci.beam", "at least 0 cells", self.beam)

    def sets(self, layer: LayerSpec) -> int:
        return layer.query_heads if self.variant is Variant.PAPER else layer.kv_heads

    def index(self, layer: LayerSpec) -> RecallIndex:
        return DciIndex(self, layer)

    def width(self, entries: int) -> int:
        """Cells of each level that a search over `entries` entries visits."""
        if self.beam:
            return self.beam
        if self.variant is Variant.LARDER:
            return max(24, math.ceil(0.5 * math.sqrt(entries)))
        return max(30, int(0.0015 * entries))


class DciIndex(RecallIndex):
    """DCI trees of one layer."""

    def __init__(self, part: Dci, layer: LayerSpec) -> None:
        self.page = part.page
        self._mean_dim = layer.head_dim if part.variant is Variant.LARDER else 0
        self.forest = DciForest(layer.kv_heads, part.page, self._mean_dim)
        self._part, self._layer = part, layer
        first, further = part.ratios[part.variant]
        self._levels = LevelAssigner(
            part.first or first,
            part.further or further,
            part.variant is Variant.PAPER,
            (part.seed, layer.index),
        )
        drawn = np.random.default_rng(part.seed).normal(size=layer.head_dim + 1)
        self._direction = (drawn / np.linalg.norm(drawn)).astype(np.float32)

    def add(self, entries: Entries, queries: Float[Tensor, "H Q D"] | None = None) -> None:
        forest = self.forest
        check_new_entries(entries, tuple(forest.known.tolist()), self._layer.index)
        coming = np.array(entries.lengths) - forest.known
        for head in np.nonzero(coming)[0].tolist():
            if entries.lengths[head] >= self._due(head, int(coming[head])):
                self._build(head, entries.head_keys(head))
                coming[head] = 0
        if bool(coming.any()):
            self._insert(entries, coming)
        forest.known[:] = entries.lengths
        forest.peaks = np.maximum(forest.peaks, forest.counts[:, 0])

    def _due(self, head: int, coming: int) -> float:
        """Entries at which the tree of a head is built again, if `coming` of them are new.

        In decode steps, in which few are new, each tree of a model is due at another length.
        """
        built = int(self.forest.built[head])
        if coming > MAX_STEP_ENTRIES:
            return float(GROWTH * built)
        tree = self._layer.index * self._layer.kv_heads + head
        return built * (GROWTH + tree * GOLDEN_RATIO % 1)

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        ranked, _ = self.search(queries, entries, count)
        if self._part.variant is Variant.PAPER:
            return RecallResult(ranked)
        return RecallResult(interleaved(ranked, self._layer.kv_heads, count))

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        layout = indexed_layout(entries, tuple(self.forest.known.tolist()))
        scores = page_max_scores(queries, entries.keys, *layout)
        bests = scatter_page_max(scores, self._page_of(scores.shape[1]), max(self.counts))
        ranked = top_rows(bests, count)
        if self._part.variant is Variant.PAPER:
            return RecallResult(ranked)
        return RecallResult(interleaved(ranked, self._layer.kv_heads, count))

    def search(
        self, queries: Float[Tensor, "H D"], entries: Entries, count: int
    ) -> tuple[Int64[Tensor, "H P"], Int64[Tensor, " H"]]:
        """Best pages of each query head, and the number of keys scored for them."""
        forest = self.forest
        if entries.is_coded and self._mean_dim:
            return self._search_coded(queries, entries, count)
        layout = np.array(entries.starts), forest.tree, forest.bases, forest.levels
        ranked, seen = dci.search(queries, entries.keys, *layout, self._beams(count), count)
        return torch.from_numpy(ranked), torch.from_numpy(seen)

    @property
    def has_key_trees(self) -> bool:
        return self._part.variant is not Variant.PAPER  # whose sets are of query heads

    def key_trees(self, count: int) -> KeyTrees:
        forest = self.forest
        return KeyTrees(forest.tree, forest.bases, forest.levels, self._beams(count))

    def _beams(self, count: int) -> Array:
        """Cells of each level that a search for `count` pages visits in each head."""
        known = zip(self.forest.known.tolist(), self.counts, strict=True)
        # If all pages are requested, none may be missed: every cell is visited.
        return np.array([self._part.width(n) if count < pages else n for n, pages in known])

    def _search_coded(
        self, queries: Float[Tensor, "H D"], entries: Entries, count: int
    ) -> tuple[Int64[Tensor, "H P"], Int64[Tensor, " H"]]:
        """`search` that asks for the keys of the visited cells alone, which their means choose."""
        forest, starts = self.forest, entries.layout[0]
        layout = forest.tree, forest.bases, forest.levels
        found, seen = dci.visited_pages(queries, *layout, self._beams(count), max(self.counts))
        visited = torch.from_numpy(found)
        is_there = visited_mask(visited, max(self.counts))
        heads = len(starts)
        pages, owned = distinct_rows(is_there.view(heads, -1, is_there.shape[1]).any(1))
        members = self.contents(pages.masked_fill(~owned, -1))
        held = members >= 0
        rows = (members + starts[:, None, None])[held]
        keys = entries.keys_at(rows).float().split(held.sum((1, 2)).tolist())
        asked = queries.float().view(heads, -1, queries.shape[1])
        scores = torch.full(is_there.shape, -torch.inf).view(heads, -1, is_there.shape[1])
        for head, own in enumerate(keys):
            products = torch.full((len(asked[head]), *members.shape[1:]), -torch.inf)
            products[:, held[head]] = asked[head] @ own.T
            there = pages[head][owned[head]]
            scores[head][:, there] = products.amax(2)[:, owned[head]]
        ranked = top_rows(scores.flatten(0, 1).masked_fill(~is_there, -torch.inf), count)
        return ranked, torch.from_numpy(seen)

    def contents(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P S"]:
        return self.forest.contents(pages)

    def versions(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P"]:
        versions = torch.from_numpy(self.forest.versions(pages)).long()
        return versions.masked_fill(pages < 0, 0)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(self.forest.counts[:, 0].tolist())

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.forest.tensors(), torch.from_numpy(self._direction))

    @property
    def nbytes(self) -> int:
        return self.forest.nbytes + self._direction.nbytes

    def state(self) -> dict[str, Tensor]:
        return self.forest.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.forest.restore(state)

    def _build(self, head: int, keys: Float[Tensor, "S D"]) -> None:
        square = MARGIN**2 * _largest(keys)
        targets, upcoming = self._levels.initial_levels(len(keys), head)
        built = build_tree(
            keys,
            targets,
            upcoming,
            square,
            direction=self._direction,
            page=self.page,
            beam=PARENT_BEAM,
            mean_dim=self._mean_dim,
        )
        self.forest.replace(head, built)

    def _insert(self, entries: Entries, coming: Array) -> None:
        forest = self.forest
        targets = self._levels.next_levels(forest, coming)
        cells = forest.counts[:, 1] + (targets > 0).sum(1)
        forest.reserve(forest.counts[:, 0] + coming, cells)
        dci.insert(
            targets,
            forest.known,
            entries.keys,
            np.array(entries.starts),
            squares=forest.squares,
            direction=self._direction,
            tree=forest.tree,
            bases=forest.bases,
            levels=forest.levels,
            beams=np.full(len(coming), PARENT_BEAM),
            counts=forest.counts,
        )

    def _page_of(self, entries: int) -> Int64[Tensor, "K S"]:
        """Page of each entry; -1 where a head has no such entry."""
        page_of = np.full((len(self.counts), entries), -1, np.int64)
        for head, count in enumerate(self.counts):
            held = self.forest.entries_of(head, count)
            pages, slots = np.nonzero(held >= 0)
            page_of[head, held[pages, slots]] = pages
        return torch.from_numpy(page_of)


def visited_mask(pages: Int64[Tensor, "H P"], count: int) -> Bool[Tensor, "H N"]:
    """Mask of `count` pages: those that each row lists; rows are padded with -1."""
    mask = torch.zeros(len(pages), count + 1, dtype=torch.bool)
    return mask.scatter_(1, pages + 1, True)[:, 1:]


def distinct_rows(mask: Bool[Tensor, "K N"]) -> tuple[Int64[Tensor, "K P"], Bool[Tensor, "K P"]]:
    """Indices of the true columns of each row, ascending, and a mask of the valid ones."""
    counts = mask.sum(1)
    order = (~mask).long().argsort(stable=True, dim=1)[:, : int(counts.max())]
    return order, torch.arange(order.shape[1]) < counts[:, None]


def _largest(keys: Float[Tensor, "S D"]) -> float:
    """Largest squared norm."""
    parts = keys.split(1 << 14)
    return max(
        (float(part.float().square().sum(-1).max()) for part in parts if len(part)), default=0.0
    )


Part = Dci
