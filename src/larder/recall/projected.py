"""Projected graph (RetrievalAttention, RoarGraph): edges between keys that answer one query.

Liu et al., "RetrievalAttention: Accelerating Long-Context LLM Inference via Vector Retrieval"
(2024), arXiv:2409.10516, builds its index on Chen et al., "RoarGraph: A Projected Bipartite Graph
for Efficient Cross-Modal Approximate Nearest Neighbor Search" (2024), arXiv:2408.08933. The exact
nearest keys of every query of the prompt are found; the nearest of them, its pivot, is linked with
the others, and these with it. Of the links of a pivot a key is left out that lies nearer to one
already linked than to the pivot, unless there is room left. A search starts at a fixed key and
follows links from the best keys seen so far, by inner products, until none of the best `beam` keys
is left to follow.

Inferred, since the papers' index has no public source that we read: distances between keys are
Euclidean; what RoarGraph adds by searches, so that every key can be reached, are here links to the
entries before and after and to a key's exact nearest keys. Queries are the latest of the text, all
of a kv head's query heads together. Several keys are followed at once. New entries are scored one
by one until there are as many as the graph has; then it is built again. Each query head has
a set of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from larder.core.arguments import require_at_least
from larder.core.observation import Entries
from larder.core.recall import RecallResult
from larder.core.spec import LayerSpec
from larder.ops.search import page_max_scores, top_rows
from larder.recall._index_base import EntryIndex, EntryRecall, group_queries

NEAREST = 4  # exact nearest keys that every key is linked with
FOLLOWED = 8  # keys that a search follows at once
MAX_PRODUCTS = 1 << 22  # of keys with keys at once: 16 MiB


@dataclass(frozen=True)
class Projected(EntryRecall):
    """Entries by a walk over a graph that queries of the text have made.

    Args:
        beam: best keys that a search follows links of; more if more entries are requested.
        links: nearest keys of every observed query.
        degree: most links of a key by queries.
        least: entries of the first graph; fewer are scored one by one.
    """

    beam: int = 128
    links: int = 32
    degree: int = 32
    least: int = 1024

    observed: ClassVar[int] = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(
            1, "projected", beam=self.beam, links=self.links, degree=self.degree, least=self.least
        )

    def index(self, layer: LayerSpec) -> ProjectedIndex:
        return ProjectedIndex(layer, self)


class ProjectedIndex(EntryIndex):
    """Index with the links of each key, -1 behind the last, and the key that a walk starts at."""

    tables: ClassVar = {"built": None, "entry": None, "edges": None}

    def __init__(self, layer: LayerSpec, part: Projected) -> None:
        super().__init__(layer)
        self._part = part
        self._built = torch.zeros(layer.kv_heads, dtype=torch.int64)
        self._entry = torch.zeros(layer.kv_heads, dtype=torch.int64)
        width = part.degree + NEAREST + 2
        self._edges = torch.zeros(layer.kv_heads, 0, width, dtype=torch.int32)

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        for head, now in enumerate(entries.lengths):
            built = int(self._built[head])
            if now - built >= max(built, self._part.least):
                observed = self._queries_of(head, queries)
                self._build(head, entries.head_keys(head).float(), observed)

    def _queries_of(self, head: int, queries: Tensor | None) -> Float[Tensor, "N D"]:
        """Observed queries of the query heads of a kv head."""
        if queries is None:
            return torch.zeros(0, self.layer.head_dim)
        group = self.layer.group
        return queries[head * group : (head + 1) * group].float().flatten(0, 1)

    def _build(self, head: int, keys: Float[Tensor, "S D"], queries: Float[Tensor, "N D"]) -> None:
        edges = torch.cat([self._projected(keys, queries), _near_edges(keys)], 1)
        missing = max(len(keys) - self._edges.shape[1], 0)
        room = self._edges.new_full((self._edges.shape[0], missing, edges.shape[1]), -1)
        self._edges = torch.cat([self._edges, room], 1)
        self._edges[head, : len(keys)] = edges
        self._built[head] = len(keys)
        middle = queries.mean(0) if len(queries) else keys.mean(0)
        self._entry[head] = (keys @ middle).argmax()

    def _projected(
        self, keys: Float[Tensor, "S D"], queries: Float[Tensor, "N D"]
    ) -> Int32[Tensor, "S M"]:
        """Links that queries make, the first of each key at the front."""
        edges = torch.full((len(keys), self._part.degree), -1, dtype=torch.int32)
        if not len(queries) or len(keys) < 2:
            return edges
        near = top_rows(queries @ keys.T, self._part.links)
        pivots, others = near[:, :1].expand_as(near[:, 1:]).flatten(), near[:, 1:].flatten()
        chosen: list[tuple[Tensor, Tensor]] = []
        for pivot in pivots.unique().tolist():
            linked = _pruned(keys, pivot, others[pivots == pivot].unique(), self._part.degree)
            chosen.append((torch.full_like(linked, pivot), linked))
        heads, tails = (torch.cat(side) for side in zip(*chosen, strict=True))
        return _with_edges(edges, torch.cat([heads, tails]), torch.cat([tails, heads]))

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        if count >= max(self.counts):  # all entries are requested: a walk could miss some
            return self.exact(queries, entries, count)
        return RecallResult(top_rows(self.visited_products(queries, entries, count), count))

    def visited_products(
        self, queries: Float[Tensor, "H D"], entries: Entries, count: int
    ) -> Float[Tensor, "H M"]:
        """Products of each query head with the entries that it visits; -inf for the others."""
        indexed, grouped = self.paged.indexed, group_queries(queries, self.layer)
        scores = torch.full((len(queries), max(indexed)), -torch.inf)
        late = torch.tensor(indexed) - self._built
        starts = torch.tensor(entries.starts) + self._built
        fresh = page_max_scores(queries, entries.keys, starts, late)
        for head, built in enumerate(self._built.tolist()):
            span = slice(head * self.layer.group, (head + 1) * self.layer.group)
            scores[span, built : indexed[head]] = fresh[span, : indexed[head] - built]
            if built:
                keys = entries.head_keys(head)[:built].float()
                beam = max(self._part.beam, count)
                self._walk(head, keys, grouped[head], beam, scores[span, :built])
        return scores

    def _walk(
        self,
        head: int,
        keys: Float[Tensor, "S D"],
        queries: Float[Tensor, "R D"],
        beam: int,
        scores: Float[Tensor, "R S"],
    ) -> None:
        """Write the products with all visited keys into `scores`."""
        entry = self._entry[head]
        scores[:, entry] = queries @ keys[entry]
        followed = torch.zeros_like(scores, dtype=torch.bool)
        while True:
            best = scores.topk(min(beam, scores.shape[1]), dim=1)
            unfollowed = best.values.isfinite() & ~followed.gather(1, best.indices)
            if not bool(unfollowed.any()):
                return
            nodes, is_real = _first_marked(best.indices, unfollowed, FOLLOWED)
            followed.scatter_(1, nodes, is_real | followed.gather(1, nodes))
            reached = self._edges[head][nodes].masked_fill(~is_real[..., None], -1).flatten(1)
            reached = reached.long()
            rows = reached.clamp(min=0)
            products = (keys[rows] * queries[:, None]).sum(2).masked_fill(reached < 0, -torch.inf)
            scores.scatter_reduce_(1, rows, products, "amax")


def _near_edges(keys: Float[Tensor, "S D"]) -> Int32[Tensor, "S N"]:
    """Entries before and behind each key, and its exact nearest keys; -1 for none."""
    count = len(keys)
    every = torch.arange(count)
    around = torch.stack([every - 1, every + 1], 1)
    around[around >= count] = -1
    near = torch.full((count, NEAREST), -1)
    rows = max(MAX_PRODUCTS // count, 1)
    lengths = keys.square().sum(1)
    for some in every.split(rows):
        apart = lengths - 2 * keys[some] @ keys.T
        apart[torch.arange(len(some)), some] = torch.inf
        found = apart.topk(min(NEAREST, count), largest=False)
        nearest = found.indices.masked_fill(found.values.isposinf(), -1)
        near[some, : nearest.shape[1]] = nearest
    return torch.cat([around, near], 1).int()


def _pruned(
    keys: Float[Tensor, "S D"], pivot: int, others: Int64[Tensor, " C"], most: int
) -> Int64[Tensor, " L"]:
    """Keys to link a pivot with, at most `most`: spread ones first, then the nearest of the rest.

    A key is left out that lies nearer to one already linked than to the pivot.
    """
    others = others[others != pivot]
    rows = keys[others]
    apart = (rows - keys[pivot]).norm(dim=1)
    order = torch.argsort(apart, stable=True)
    others, rows, apart = others[order], rows[order], apart[order]
    between = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    linked: list[int] = []
    for number in range(len(others)):
        if len(linked) < most and bool((between[number, linked] >= apart[number]).all()):
            linked.append(number)
    rest = [number for number in range(len(others)) if number not in set(linked)]
    return others[[*linked, *rest][:most]]


def _with_edges(
    edges: Int32[Tensor, "S M"], heads: Int64[Tensor, " E"], tails: Int64[Tensor, " E"]
) -> Int32[Tensor, "S M"]:
    """Table with links from heads to tails, without repeats, as many as each row has room for."""
    width, count = edges.shape[1], len(edges)
    names, firsts = torch.unique(heads * count + tails, return_inverse=True)  # pyright: ignore
    earliest = torch.full((len(names),), len(heads)).scatter_reduce(
        0, firsts, torch.arange(len(heads)), "amin"
    )
    kept = earliest.sort().values
    order = kept[torch.argsort(heads[kept], stable=True)]
    rows = heads[order]
    counts = torch.bincount(rows, minlength=count)
    indices = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    fits = indices < width
    edges[rows[fits], indices[fits]] = tails[order][fits].int()
    return edges


def _first_marked(
    numbers: Int64[Tensor, "R B"], marked: Bool[Tensor, "R B"], count: int
) -> tuple[Int64[Tensor, "R C"], Bool[Tensor, "R C"]]:
    """The first marked numbers of each row, and which of the returned ones are marked."""
    order = torch.argsort((~marked).int(), dim=1, stable=True)[:, :count]
    return numbers.gather(1, order), marked.gather(1, order)


Part = Projected
