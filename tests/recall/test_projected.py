"""The projected graph equals the loop: links, walks, and what is found by looking at few keys."""

from __future__ import annotations

import pytest
import torch

from builders import HEAD_DIM, a_layer
from index_recall import keys_of
from larder.core import BadParameter, Entries
from larder.recall import FOLLOWED, NEAREST, Projected, ProjectedIndex
from references import projected as loop
from slow_tiers import Tier

LAYER = a_layer(kv_heads=2, group=2)


def built(
    part: Projected, counts: tuple[int, int], seed: int = 0
) -> tuple[Tier, ProjectedIndex, torch.Tensor]:
    tier, index = Tier(LAYER, seed), part.index(LAYER)
    for head, count in enumerate(counts):
        tier.keys[head] = torch.randn(
            count, HEAD_DIM, generator=torch.Generator().manual_seed(seed + head)
        )
        tier.values[head] = tier.keys[head]
    asked = torch.stack([tier.queries() for _ in range(12)], 1)
    index.add(tier.entries(), asked)
    return tier, index, asked


def links_of(index: ProjectedIndex, head: int, first: int, last: int) -> list[list[int]]:
    rows = index._edges[head, : int(index._built[head]), first:last].tolist()
    return [[n for n in row if n >= 0] for row in rows]


@pytest.mark.parametrize(("links", "degree"), [(3, 8), (8, 3), (40, 5)])
def test_links_equal_the_reference(links: int, degree: int) -> None:
    part = Projected(links=links, degree=degree, least=8)
    tier, index, asked = built(part, (40, 25), links)
    for head, keys in enumerate(keys_of(tier)):
        rows = asked[2 * head : 2 * head + 2].flatten(0, 1).tolist()
        assert links_of(index, head, 0, degree) == loop.projected(keys, rows, links, degree)
        assert links_of(index, head, degree, degree + NEAREST + 2) == loop.near(keys, NEAREST)


@pytest.mark.parametrize("beam", [1, 4, 30])
def test_visited_keys_equal_the_reference(beam: int) -> None:
    part = Projected(links=3, degree=3, least=8, beam=beam)
    tier, index, _ = built(part, (60, 30), beam)
    query = tier.queries()
    seen = index.visited_products(query, tier.entries(), 1)
    for head, keys in enumerate(keys_of(tier)):
        edges = links_of(index, head, 0, 99)
        entry = int(index._entry[head])
        for row in range(2 * head, 2 * head + 2):
            walked = loop.walked(query[row].tolist(), keys, edges, entry, beam, FOLLOWED)
            assert set(seen[row].isfinite().nonzero().flatten().tolist()) == walked


def test_occluded_links_are_added_last() -> None:
    """Of two keys on one line from the pivot only the nearer is linked, where room is short."""
    keys = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 1.5]])
    assert loop.spread(keys.tolist(), 0, [1, 2, 3], 2) == [1, 3]
    assert loop.spread(keys.tolist(), 0, [1, 2, 3], 3) == [1, 3, 2]


def test_every_key_can_be_reached_and_a_wide_beam_is_exact() -> None:
    part = Projected(least=8, links=2, degree=2, beam=400)
    tier, index, _ = built(part, (300, 120), 3)
    query = tier.queries()
    assert bool(index.visited_products(query, tier.entries(), 9)[:, :120].isfinite().all())
    found, exact = (look(query, tier.entries(), 9) for look in (index.find, index.exact))
    assert torch.equal(found.pages, exact.pages)


def test_out_of_distribution_queries_visit_few_keys() -> None:
    """Keys on a shell, queries about one far direction: a share of the keys is looked at."""
    source = torch.Generator().manual_seed(0)
    layer, far = a_layer(kv_heads=1, group=1), torch.randn(HEAD_DIM, generator=source)
    keys = torch.randn(4000, HEAD_DIM, generator=source)
    queries = 3 * far + torch.randn(264, HEAD_DIM, generator=source)
    entries = Entries(keys, keys, torch.arange(4000).int(), (0,), (4000,))
    index = Projected(beam=32).index(layer)
    index.add(entries, queries[None, 8:])
    looked, hits = 0, 0
    for query in queries[:8, None]:
        seen = index.visited_products(query, entries, 10)
        looked += int(seen.isfinite().sum())
        best = (keys @ query[0]).topk(10).indices
        hits += int(torch.isin(best, index.find(query, entries, 10).pages[0]).sum())
    assert hits >= 76
    assert looked < 8 * 400


def test_later_entries_are_scored_until_the_graph_is_built_again() -> None:
    part = Projected(least=8)
    tier, index, _ = built(part, (20, 20))
    tier.grow((19, 20))
    index.add(tier.entries())
    assert index._built.tolist() == [20, 40]
    assert bool(
        index.visited_products(tier.queries(), tier.entries(), 1)[:2, 20:39].isfinite().all()
    )


@pytest.mark.parametrize("name", ["beam", "links", "degree", "least"])
def test_parameters_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(BadParameter, match=f"projected.{name} must be at least 1, got 0"):
        Projected(**{name: 0})
