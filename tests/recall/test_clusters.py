"""Clusters equal the loop: how they are made, joined, ranked and trimmed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer
from index_recall import assert_best, built, keys_of
from larder.core import BadParameter
from larder.recall import ClusterMetric, Clusters, kmeans
from references import clusters as loop
from references import lloyd
from references.lloyd import dot
from slow_tiers import Tier

LAYER = a_layer(kv_heads=2, group=2)


@settings(max_examples=20)
@given(
    nearness=st.sampled_from(ClusterMetric),
    length=st.integers(1, 40),
    count=st.integers(1, 6),
    seed=st.integers(0, 2**31),
)
def test_clustering_equals_its_reference(nearness, length, count, seed) -> None:
    source = torch.Generator().manual_seed(seed)
    points = torch.randn(length, 4, generator=source)
    centers, labels = kmeans(points, count, 3, nearness)
    wanted, owned = lloyd.clustered(points.tolist(), count, 3, nearness.value)
    assert labels.tolist() == owned
    assert centers.flatten().tolist() == pytest.approx(sum(wanted, []), abs=1e-4)


@pytest.mark.extended
@settings(max_examples=15)
@given(
    lengths=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    size=st.sampled_from([1, 4, 100]),
    count=st.sampled_from([1, 7, 100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_index_equals_its_reference(lengths, size, count, dtype, seed) -> None:
    tier, index = Tier(LAYER, seed, dtype), Clusters(size=size, iterations=3).index(LAYER)
    tier.grow(lengths)
    tier.keys = [keys + 0.1 * torch.randn(keys.shape).to(dtype) for keys in tier.keys]  # no ties
    index.add(tier.entries())
    query, keys = tier.queries(), keys_of(tier)
    found = index.find(query, tier.entries(), count).pages.tolist()
    for h, own in enumerate(query.tolist()):
        real = [entry for entry in found[h] if entry >= 0]
        if keys[h // 2]:
            assert real == loop.find(own, *loop.made(keys[h // 2], size, 3), count)
        else:
            assert real == []
    exact = [[dot(own, key) for key in keys[h // 2]] for h, own in enumerate(query.tolist())]
    assert_best(index.exact(query, tier.entries(), count).pages, exact, count)


def test_new_entries_join_clusters_until_a_rebuild() -> None:
    tier, index = built(Clusters(size=5, iterations=2), LAYER, [(20, 20), (19, 19)])
    keys, query = keys_of(tier), tier.queries()
    found = index.find(query, tier.entries(), 39).pages.tolist()
    for h, own in enumerate(query.tolist()):
        head = keys[h // 2]
        centers, labels = loop.made(head[:20], 5, 2)
        labels = labels + [loop.joined(key, centers) for key in head[20:]]
        assert found[h] == loop.find(own, centers, labels, 39)
    tier.grow((1, 0))
    index.add(tier.entries())
    assert index.state()["made_of"].tolist() == [40, 20]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 0}, "clusters.size must be at least 1 entry, got 0"),
        ({"iterations": 0}, "clusters.iterations must be at least 1, got 0"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong, message) -> None:
    with pytest.raises(BadParameter, match=message):
        Clusters(**wrong)
