"""Product quantization equals the loop, which rounds every key."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer
from index_recall import assert_best, built, keys_of
from larder.core import BadParameter
from larder.recall import PQ
from references import pq as loop

LAYER = a_layer(kv_heads=2, group=2)


@settings(max_examples=12)
@given(
    lengths=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    parts=st.sampled_from([1, 2, 4]),
    centroids=st.sampled_from([1, 5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_index_equals_its_reference(lengths, parts, centroids, dtype, seed) -> None:
    part = PQ(parts=parts, centroids=centroids, iterations=3)
    tier, index = built(part, LAYER, [lengths], seed, dtype)
    query = tier.queries()
    rounded = [loop.rounded(keys, parts, centroids, 3) for keys in keys_of(tier)]
    scores = loop.scores(query.tolist(), rounded, LAYER.scaling)
    assert_best(index.find(query, tier.entries(), 6).pages, scores, 6)
    scores = loop.scores(query.tolist(), keys_of(tier), LAYER.scaling)
    assert_best(index.exact(query, tier.entries(), 6).pages, scores, 6)


def test_one_centroid_per_entry_is_exact() -> None:
    tier, index = built(PQ(centroids=30), LAYER, [(30, 30)])
    query = tier.queries()
    scores = loop.scores(query.tolist(), keys_of(tier), LAYER.scaling)
    assert_best(index.find(query, tier.entries(), 30).pages, scores, 30)


def test_new_entries_use_existing_centroids_until_a_rebuild() -> None:
    part = PQ(centroids=4, iterations=2)
    tier, index = built(part, LAYER, [(20, 20), (19, 19)])
    state = index.state()
    centroids, codes = state["centroids"], state["codes"]
    for head, keys in enumerate(tier.keys):
        for p in range(2):
            away = torch.cdist(keys[:, 4 * p : 4 * p + 4], centroids[head, p])
            chosen = away.gather(1, codes[head, p, :, None].long())[:, 0]
            assert torch.allclose(chosen, away.amin(1), atol=1e-5)
    assert state["made_of"].tolist() == [20, 20]
    tier.grow((1, 0))
    index.add(tier.entries())
    assert index.state()["made_of"].tolist() == [40, 20]


def test_codes_take_two_bytes_per_key() -> None:
    _, index = built(PQ(), a_layer(kv_heads=1, group=1), [(5000,)])
    assert index.state()["codes"].nbytes == 2 * 5000


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parts": 0}, "pq.parts must be at least 1, got 0"),
        ({"centroids": 257}, "pq.centroids must be from 1 to 256, got 257"),
        ({"iterations": 0}, "pq.iterations must be at least 1, got 0"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong, message) -> None:
    with pytest.raises(BadParameter, match=message):
        PQ(**wrong)


def test_parts_not_dividing_the_head_size_are_refused() -> None:
    with pytest.raises(BadParameter, match="pq.parts must divide the head size of the model, 8"):
        PQ(parts=3).index(LAYER)
