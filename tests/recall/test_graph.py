"""The graph: its signposts equal the loop, and what it finds is ranked by true products."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer
from index_recall import assert_best, keys_of
from larder.core import BadParameter, DependencyError
from larder.recall import GUIDE_QUERIES, Graph
from references import graph as loop
from slow_tiers import Tier

LAYER = a_layer(kv_heads=2, group=2)


@pytest.fixture
def usearch() -> None:
    pytest.importorskip("usearch")


def observed(tier: Tier, count: int) -> torch.Tensor:
    return torch.stack([tier.queries() for _ in range(count)], 1)


@pytest.mark.usefixtures("usearch")
@settings(max_examples=10)
@given(
    lengths=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_entries_outside_the_graph_are_scanned(lengths, dtype, seed) -> None:
    tier, index = Tier(LAYER, seed, dtype), Graph(links=3).index(LAYER)
    tier.grow(lengths)
    index.add(tier.entries(), observed(tier, 4))
    query, keys = tier.queries(), keys_of(tier)
    products = [loop.products(own, keys[h // 2]) for h, own in enumerate(query.tolist())]
    for search in (index.find, index.exact):
        assert_best(search(query, tier.entries(), 5).pages, products, 5)


@pytest.mark.usefixtures("usearch")
def test_search_for_all_entries_is_complete() -> None:
    tier, index = Tier(LAYER), Graph(beam=1, links=1, least=8).index(LAYER)
    tier.grow((2000, 20))
    index.add(tier.entries())
    found = index.find(tier.queries(), tier.entries(), 2000).pages.tolist()
    assert [len(set(row) - {-1}) for row in found] == [2000, 2000, 20, 20]


@pytest.mark.usefixtures("usearch")
def test_results_are_the_best_of_graph_and_pending_entries() -> None:
    tier, index = Tier(LAYER), Graph(beam=4, links=3, least=50).index(LAYER)
    tier.grow((200, 90))
    seen = observed(tier, 20)
    index.add(tier.entries(), seen)
    tier.grow((10, 5))
    index.add(tier.entries(), observed(tier, 20))
    assert index.state()["in_graph"].tolist() == [200, 90]
    query, keys = tier.queries(), keys_of(tier)
    found = index.find(query, tier.entries(), 12).pages.tolist()
    for h, own in enumerate(query.tolist()):
        k = h // 2
        products, first = loop.products(own, keys[k]), [200, 90][k]
        signs = seen[2 * k : 2 * k + 2].flatten(0, 1).tolist()
        sure = loop.linked(own, signs, keys[k][:first], GUIDE_QUERIES, 3) | set(
            range(first, len(keys[k]))
        )
        ranked = sorted(products, reverse=True)
        result = [products[n] for n in found[h]]
        assert result == sorted(result, reverse=True)
        must = sorted((products[n] for n in sure), reverse=True)[:12]
        assert all(a >= b - 1e-5 for a, b in zip(result, must, strict=False))
        shared = sum(any(abs(a - b) < 1e-5 for b in result) for a in ranked[:12])
        assert shared >= 8  # a walk of 12 keys in view through 200 finds most of them


@pytest.mark.usefixtures("usearch")
def test_observed_query_finds_its_nearest_keys() -> None:
    tier, index = Tier(LAYER), Graph(beam=1, links=6, least=100).index(LAYER)
    tier.grow((400, 400))
    seen = observed(tier, 30)
    index.add(tier.entries(), 5 * seen)
    for at in (0, 17, 29):
        exact = index.exact(seen[:, at], tier.entries(), 6).pages
        assert torch.equal(index.find(seen[:, at], tier.entries(), 6).pages, exact)


@pytest.mark.usefixtures("usearch")
def test_graph_is_rebuilt_after_doubling() -> None:
    tier, index = Tier(LAYER), Graph(least=10).index(LAYER)
    for growth, built in (
        ((9, 0), [0, 0]),
        ((1, 0), [10, 0]),
        ((9, 10), [10, 10]),
        ((1, 0), [20, 10]),
    ):
        tier.grow(growth)
        index.add(tier.entries())
        assert index.state()["in_graph"].tolist() == built


def test_missing_package_is_named_with_its_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    with pytest.raises(DependencyError, match=r'pip install "larder\[graph\]"'):
        Graph().index(LAYER)


@pytest.mark.parametrize("name", ["beam", "links", "least"])
def test_parameters_out_of_range_are_refused(name) -> None:
    with pytest.raises(BadParameter, match=f"graph.{name} must be at least 1, got 0"):
        Graph(**{name: 0})
