"""Squeezed Attention equals the loop: clusters, scores, one threshold for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from weakref import ref

import pytest
import torch

from builders import HEAD_DIM, a_layer, draw, layer_options
from cache_stores import append, extend, new_tokens
from index_recall import keys_of
from larder.cache import TieredLayer
from larder.core import BadParameter, OffloadSpec, Plan
from larder.recall import Squeezed, SqueezedIndex, weighted_quantile
from references import squeezed as loop
from slow_tiers import Tier

LAYER = a_layer(kv_heads=2, group=2)
SMALL = {"share": 0.2, "iterations": 3, "coarse": 0.0}


def test_scores_hand_values() -> None:
    hand = [0.261, 0.096, 0.035]
    assert loop.shares([2.0, 1.0, 0.0], [1, 4, 10]) == pytest.approx(hand, abs=6e-4)
    layer = replace(a_layer(kv_heads=1, group=1), scaling=1.0)
    index = Squeezed().index(layer)
    centroids, sizes = torch.zeros(1, 3, HEAD_DIM), torch.tensor([[1.0, 4.0, 10.0]])
    centroids[0, :, 0] = torch.tensor([2.0, 1.0, 0.0])
    query = torch.zeros(1, HEAD_DIM)
    query[0, 0] = 1.0
    scores = index._cluster_scores(query, centroids, sizes)
    assert scores[0].tolist() == pytest.approx(hand, abs=6e-4)


def built(part: Squeezed, counts: tuple[int, int], seed: int = 0) -> tuple[Tier, SqueezedIndex]:
    tier, index = Tier(LAYER, seed), part.index(LAYER)
    tier.grow(counts)
    noise = torch.Generator().manual_seed(seed)  # no ties
    tier.keys = [k + 0.1 * torch.randn(k.shape, generator=noise) for k in tier.keys]
    index.add(tier.entries(), torch.stack([tier.queries() for _ in range(4)], 1))
    return tier, index


@pytest.mark.parametrize("count", [5, 100])
@pytest.mark.parametrize("dropped", [0.0, 0.5, 0.9])
def test_index_equals_its_reference(count, dropped) -> None:
    part = Squeezed(**SMALL, dropped=dropped, update=8)
    tier, index = built(part, (40, 23), 2)
    rows = torch.stack([tier.queries() for _ in range(4)], 1)
    index._scores = index._mean_scores(rows, index._used("centroids"), index.cluster_sizes)
    part.measure([index])
    clusters = [loop.clusters_of(keys, 0.2, 3) for keys in keys_of(tier)]
    scored = []
    for k, own in enumerate(clusters):
        each = [
            loop.scores(rows[h, q].tolist(), keys_of(tier)[k], own, LAYER.scaling)
            for h in (2 * k, 2 * k + 1)
            for q in range(4)
        ]
        means = [sum(column) / len(each) for column in zip(*each, strict=True)]
        scored += [(mean, len(cluster)) for mean, cluster in zip(means, own, strict=True)]
    least = loop.threshold(scored, dropped)
    assert float(index._threshold) == pytest.approx(least, rel=1e-4)
    tier.grow((3, 0))  # pending
    index.add(tier.entries())
    query = tier.queries()
    found = index.find(query, tier.entries(), count).pages
    for k, own in enumerate(clusters):
        keys = keys_of(tier)[k]
        each = [
            loop.scores(query[h].tolist(), keys, own, LAYER.scaling) for h in (2 * k, 2 * k + 1)
        ]
        means = [sum(pair) / 2 for pair in zip(*each, strict=True)]
        pending = range(40, 43) if k == 0 else []
        expected = loop.above(means, own, least, pending, count)
        assert [page for page in found[k].tolist() if page >= 0] == (expected or [0])


def mean_scores(rows, keys, clusters, scores=loop.scores) -> list[float]:
    """Scores of clusters, the means over queries."""
    each = [scores(row, keys, clusters, LAYER.scaling) for row in rows]
    return [sum(column) / len(each) for column in zip(*each, strict=True)]


@pytest.mark.parametrize("coarse_dropped", [0.0, 0.4, 0.8])
def test_two_levels_equal_the_reference(coarse_dropped) -> None:
    shares = {"share": 0.3, "coarse": 0.12, "iterations": 3, "update": 100}
    part = Squeezed(**shares, dropped=0.5, coarse_dropped=coarse_dropped)
    tier, index = Tier(LAYER, 5), part.index(LAYER)
    tier.grow((50, 50))
    noise = torch.Generator().manual_seed(5)  # no ties
    tier.keys = [k + 0.1 * torch.randn(k.shape, generator=noise) for k in tier.keys]
    rows = torch.stack([tier.queries() for _ in range(4)], 1)
    index.add(tier.entries(), rows)
    part.measure([index])
    fine, coarse, levels = [], [], []
    for k, keys in enumerate(keys_of(tier)):
        clusters = loop.clusters_of(keys, 0.3, 3)
        groups = loop.coarse_clusters_of(keys, clusters, 0.12, 3)
        sizes = [sum(len(clusters[c]) for c in group) for group in groups]
        own = rows[2 * k : 2 * k + 2].flatten(0, 1).tolist()
        coarse_of = partial(coarse_scores, coarse=groups)
        fine += zip(mean_scores(own, keys, clusters), map(len, clusters), strict=True)
        coarse += zip(mean_scores(own, keys, clusters, coarse_of), sizes, strict=True)
        levels.append((keys, clusters, groups, coarse_of))
    least, lower = loop.threshold(fine, 0.5), loop.threshold(coarse, coarse_dropped)
    assert float(index._coarse_threshold) == pytest.approx(lower, rel=1e-4)
    assert float(index._threshold) == pytest.approx(least, rel=1e-4)
    query = tier.queries()
    found = index.find(query, tier.entries(), 100).pages
    for k, (keys, clusters, groups, coarse_of) in enumerate(levels):
        own = query[2 * k : 2 * k + 2].tolist()
        scored = mean_scores(own, keys, clusters, coarse_of)
        left = loop.surviving(scored, groups, lower, clusters)
        expected = loop.above(mean_scores(own, keys, left), left, least, [], 100)
        assert [page for page in found[k].tolist() if page >= 0] == (expected or [0])


def coarse_scores(query, keys, clusters, scaling, *, coarse) -> list[float]:
    return loop.coarse_scores(query, keys, clusters, coarse, scaling)


def test_denominator_counts_survivors_only() -> None:
    """Logits 2, 1, 0 of sizes 1, 4, 10; without the last, 7.389 / (7.389 + 4 * 2.718)."""
    layer = replace(a_layer(kv_heads=1, group=1), scaling=1.0)
    index = Squeezed().index(layer)
    centroids = torch.zeros(1, 3, HEAD_DIM)
    centroids[0, :, 0] = torch.tensor([2.0, 1.0, 0.0])
    index._made, index._coarse_made = torch.tensor([3]), torch.tensor([2])
    index._sizes = torch.tensor([[1.0, 4.0, 10.0]])
    index._coarse_labels = torch.tensor([[0, 0, 1]], dtype=torch.int32)
    index._coarse_centroids = torch.zeros(1, 2, HEAD_DIM)
    index._coarse_centroids[0, :, 0] = torch.tensor([1.5, 0.0])
    index._coarse_sizes = torch.tensor([[5.0, 10.0]])
    query = torch.zeros(1, HEAD_DIM)
    query[0, 0] = 1.0
    index.set_thresholds(0.0, 0.05)  # coarse scores: 4.482 / (5 * 4.482 + 10) = .138, and .031
    sizes = index._surviving_sizes(query)
    assert sizes[0].tolist() == [1.0, 4.0, 0.0]
    scores = index._cluster_scores(query, centroids, sizes)[0].tolist()
    assert scores == pytest.approx([0.4046, 0.1488, 0.0], abs=1e-4)


def test_heads_find_different_counts_with_a_global_share() -> None:
    part, tier = Squeezed(share=0.2, dropped=0.6, coarse=0.0), Tier(LAYER, 4)
    tier.grow((200, 200))
    query = 3 * tier.queries()
    index = part.index(LAYER)
    index.add(tier.entries(), query[:, None].repeat(1, 8, 1))
    part.measure([index])
    counts = (index.find(query, tier.entries(), 200).pages >= 0).sum(1)
    assert counts[0] != counts[1]
    assert float(counts.sum()) / 400 == pytest.approx(0.4, abs=0.06)


def test_one_threshold_holds_for_all_layers() -> None:
    part = Squeezed(**SMALL, dropped=0.5)
    (_, one), (_, other) = built(part, (40, 40), 1), built(part, (40, 40), 2)
    part.measure([one, other])
    assert float(one._threshold) == float(other._threshold) > 0
    pairs = [
        (score, size)
        for index in (one, other)
        for score, size in zip(
            index.observed_scores.flatten().tolist(),
            index.cluster_sizes.flatten().int().tolist(),
            strict=True,
        )
    ]
    assert float(one._threshold) == pytest.approx(loop.threshold(pairs, 0.5), rel=1e-4)
    before = float(one._threshold)
    part.measure([one])  # nothing was scored since
    assert float(one._threshold) == before


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 0.0), (0.2, 0.0), (0.5, 1.0), (0.79, 1.0), (0.8, 2.0), (0.99, 2.0)],
)
def test_weighted_quantile_hand_values(share, expected) -> None:
    """Five of ten entries have the lowest score, three the next, two the best."""
    scores, counts = torch.tensor([2.0, 1.0, 3.0]), torch.tensor([3.0, 5.0, 2.0])
    assert weighted_quantile(scores, counts, share) == expected


def two_layers() -> list[TieredLayer]:
    """Two layers of a cache with 60 entries each, most of them offloaded."""
    recall = Squeezed(**SMALL, tokens=30, dense=0)
    spec = OffloadSpec(recall)
    layers = [TieredLayer(a_layer(2, 2, index=n), layer_options(parking=spec)) for n in range(2)]
    layers[0]._measured_with = tuple(map(ref, layers))
    for n, store in enumerate(layers):
        new = draw(LAYER, 60, 0, n)
        store.observe(new_tokens(new), (new.queries, new.queries[..., 0]))
        append(store, new)
        store.apply(Plan.from_mask(torch.arange(120) % 60 >= 55, store.lengths))
    return layers


def search(store: TieredLayer) -> None:
    step = draw(LAYER, 1, 60, 9)
    extend(store, step)


def thresholds(layers: Sequence[TieredLayer]) -> list[float]:
    indexes = [store.fetcher.shared_index.index for store in layers]
    return [float(each._threshold) for each in indexes if isinstance(each, SqueezedIndex)]


def test_layers_share_the_threshold_before_the_first_search() -> None:
    layers = two_layers()
    search(layers[0])
    first, second = thresholds(layers)
    assert first == second > 0


def test_search_of_a_fork_does_not_change_its_sources_thresholds() -> None:
    layers = two_layers()
    for store in layers:  # the indexes know all entries, and no search has measured them
        store._update_index()
    forks = [store.fork() for store in layers]
    forks[0]._measured_with = tuple(map(ref, forks))
    before = thresholds(layers)
    search(forks[0])
    first, second = thresholds(forks)
    assert first == second > 0 == max(before)
    assert thresholds(layers) == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"share": 0.0}, r"squeezed.share must be in \(0, 1\], got 0.0"),
        ({"coarse": 0.05}, "squeezed.coarse must be 0 or more and below share=0.05, got 0.05"),
        ({"coarse_dropped": 1.0}, r"squeezed.coarse_dropped must be in \[0, 1\), got 1.0"),
        ({"dropped": 1.0}, r"squeezed.dropped must be in \[0, 1\), got 1.0"),
        ({"update": 0}, "squeezed.update must be at least 1, got 0"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong, message) -> None:
    with pytest.raises(BadParameter, match=message):
        Squeezed(**wrong)
