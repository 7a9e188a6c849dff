"""Graph index (RetrievalAttention, RoarGraph): nearest-neighbor graph guided by observed queries.

Liu et al., "RetrievalAttention: Accelerating Long-Context LLM Inference via Vector Retrieval"
(2024), arXiv:2409.10516: queries are distributed differently from keys, so a graph of near keys
serves them badly; the index is therefore built from the exact nearest keys of the queries of
the prompt. It names Chen et al., "RoarGraph: A Projected Bipartite Graph for
Efficient Cross-Modal Approximate Nearest Neighbor Search" (2024), arXiv:2408.08933, whose graph
links a key to keys that answer the same query.

Implemented is the bipartite half of it; `projected` is the whole. Every observed query keeps its
exact nearest keys; a new query goes to the observed ones of the largest cosine, and their keys are
candidates. Differences: these are not projected into edges between keys, since the library
(usearch, a hierarchical graph over inner products) accepts no edges; the search in its graph adds
its own candidates, and all candidates are ranked by their true products. Only the latest queries
are observed. New entries are scored one by one until there are as many as the graph has; then it is
rebuilt. Each query head searches for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import normalize

from larder.core.arguments import require_at_least
from larder.core.errors import DependencyError
from larder.core.observation import Entries
from larder.core.recall import RecallResult
from larder.core.spec import LayerSpec
from larder.ops.search import page_max_scores, top_rows
from larder.recall._index_base import EntryIndex, EntryRecall, group_queries

EDGES = 16  # of each key in the graph, twice as many on its lowest level
BUILD_BEAM = 64  # expansion while a key is inserted
GUIDE_QUERIES = 8  # observed queries that a new one is compared with


@dataclass(frozen=True)
class Graph(EntryRecall):
    """Entries by approximate search for the largest products.

    Args:
        beam: expansion of the graph search; more if more entries are requested.
        links: nearest keys that every observed query keeps.
        least: entries of the first graph; fewer are scored one by one.
    """

    beam: int = 128
    links: int = 32
    least: int = 1024

    observed: ClassVar[int] = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, "graph", beam=self.beam, links=self.links, least=self.least)

    def index(self, layer: LayerSpec) -> GraphIndex:
        """
        Raises:
            DependencyError: the package usearch is not installed.
        """
        return GraphIndex(layer, self)


class GraphIndex(EntryIndex):
    """Index with a bfloat16 graph per kv head, keys included, and observed queries with links."""

    def __init__(self, layer: LayerSpec, part: Graph) -> None:
        super().__init__(layer)
        self._part = part
        self._make = _usearch_index()
        self._graphs: list[Any] = [None] * layer.kv_heads
        self._in_graph = torch.zeros(layer.kv_heads, dtype=torch.int64)
        self._signs = torch.zeros(layer.kv_heads, 0, layer.head_dim)  # observed, of length 1
        self._links = torch.zeros(layer.kv_heads, 0, part.links, dtype=torch.int32)

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        is_rebuilt = False
        for head, (built, now) in enumerate(
            zip(self._in_graph.tolist(), entries.lengths, strict=True)
        ):
            if now - built >= max(built, self._part.least):
                self._build(head, entries.head_keys(head))
                is_rebuilt = True
        if queries is not None and (is_rebuilt or not self._signs.shape[1]):
            seen = queries.float().reshape(self.layer.kv_heads, -1, self.layer.head_dim)
            self._signs = normalize(seen, dim=-1)
            is_rebuilt = True
        if is_rebuilt:
            self._link(entries)

    def _build(self, head: int, keys: Float[Tensor, "S D"]) -> None:
        graph = self._make(
            ndim=keys.shape[1],
            metric="ip",
            dtype="bf16",
            connectivity=EDGES,
            expansion_add=BUILD_BEAM,
            expansion_search=self._part.beam,
        )
        # One thread, so that the same keys make the same graph.
        graph.add(np.arange(len(keys)), keys.float().contiguous().numpy(), threads=1)
        self._graphs[head], self._in_graph[head] = graph, len(keys)

    def _link(self, entries: Entries) -> None:
        """Exact nearest keys of every observed query; -1 after the last."""
        links = torch.full((*self._signs.shape[:2], self._part.links), -1, dtype=torch.int32)
        for head, signs in enumerate(self._signs):
            best = top_rows(signs @ entries.head_keys(head).float().T, self._part.links)
            links[head, :, : best.shape[1]] = best.int()
        self._links = links

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        if count >= max(self.counts):  # all entries are requested: a graph search could miss some
            return self.exact(queries, entries, count)
        grouped = group_queries(queries, self.layer)
        scores = self._new_products(queries, entries)
        for head, built in enumerate(self._in_graph.tolist()):
            rows = scores[head * self.layer.group : (head + 1) * self.layer.group]
            self._score(self._links_of(head, grouped[head]), grouped[head], entries, head, rows)
            if built:
                reached = self._nearest(head, grouped[head], min(count, built))
                self._score(reached, grouped[head], entries, head, rows)
        return RecallResult(top_rows(scores, count))

    def _new_products(
        self, queries: Float[Tensor, "H D"], entries: Entries
    ) -> Float[Tensor, "H M"]:
        """Products with entries outside the graphs; -inf for those inside."""
        indexed, built = self.paged.indexed, self._in_graph.tolist()
        starts = torch.tensor(entries.starts) + self._in_graph
        products = page_max_scores(
            queries, entries.keys, starts, torch.tensor(indexed) - self._in_graph
        )
        scores = torch.full((len(queries), max(indexed)), -torch.inf)
        group = self.layer.group
        for head, (length, first) in enumerate(zip(indexed, built, strict=True)):
            span = slice(head * group, (head + 1) * group)
            scores[span, first:length] = products[span, : length - first]
        return scores

    def _links_of(self, head: int, queries: Float[Tensor, "R D"]) -> Int64[Tensor, "R C"]:
        """Keys linked to the observed queries most similar to the new ones."""
        guides = top_rows(queries @ self._signs[head].T, GUIDE_QUERIES)
        return self._links[head][guides].flatten(1).long()

    def _nearest(
        self, head: int, queries: Float[Tensor, "R D"], count: int
    ) -> Int64[Tensor, "R C"]:
        """Keys found in the graph."""
        graph = self._graphs[head]
        graph.expansion_search = max(self._part.beam, count)
        found = [graph.search(row, count, threads=1).keys for row in queries.numpy()]
        reached = torch.full((len(found), count), -1)
        for row, keys in zip(reached, found, strict=True):
            row[: len(keys)] = torch.from_numpy(keys.astype(np.int64))
        return reached

    def _score(
        self,
        candidates: Int64[Tensor, "R C"],
        queries: Float[Tensor, "R D"],
        entries: Entries,
        head: int,
        scores: Float[Tensor, "R M"],
    ) -> None:
        """Write the true products of candidates into `scores`."""
        if self.paged.indexed[head] and candidates.shape[1]:
            some = candidates.clamp(min=0)
            rows = entries.keys.index_select(0, some.flatten() + entries.starts[head])
            keys = rows.float().view(*some.shape, queries.shape[1])  # [R, C, D]
            products = (keys * queries[:, None]).sum(2).masked_fill_(candidates < 0, -torch.inf)
            scores.scatter_reduce_(1, some, products, "amax")

    def tensors(self) -> tuple[Tensor, ...]:
        # Graphs are in the library's own memory: meta tensors of their size count their bytes.
        graphs = tuple(
            torch.empty(graph.memory_usage, dtype=torch.uint8, device="meta")
            for graph in self._graphs
            if graph is not None
        )
        return (*super().tensors(), self._in_graph, self._signs, self._links, *graphs)

    def state(self) -> dict[str, Tensor]:
        graphs = {
            f"graph{head}": torch.frombuffer(graph.save(), dtype=torch.uint8).clone()
            for head, graph in enumerate(self._graphs)
            if graph is not None
        }
        held = {"in_graph": self._in_graph, "signs": self._signs, "links": self._links}
        held = {name: tensor.clone() for name, tensor in held.items()}
        return {**super().state(), **held, **graphs}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self._in_graph = state["in_graph"].clone()
        self._signs, self._links = state["signs"].clone(), state["links"].clone()
        for head, built in enumerate(self._in_graph.tolist()):
            if built:
                stored = state[f"graph{head}"].numpy().tobytes()
                self._graphs[head] = self._make.restore(stored)


def _usearch_index() -> Any:
    try:
        from usearch.index import Index
    except ImportError as error:
        raise DependencyError(
            "recall graph needs the package usearch, which is not installed; "
            'run `pip install "larder[graph]"`, or use the recall `dci`.'
        ) from error
    return Index


Part = Graph
