"""SparQ equals the loop: entries, shares and means."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import HEAD_DIM, a_layer
from index_recall import assert_best, built, keys_of
from larder.core import BadParameter
from larder.recall import SparQ
from references import sparq as loop
from slow_tiers import Tier

LAYER = a_layer(kv_heads=2, group=2)


@settings(max_examples=25)
@given(
    growths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=3),
    channels=st.sampled_from([1, 3, 8, 99]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_index_equals_its_reference(growths, channels, dtype, seed) -> None:
    tier, index = built(SparQ(channels=channels), LAYER, growths, seed, dtype)
    query, keys = tier.queries(), keys_of(tier)
    for search, read in ((index.find, min(channels, HEAD_DIM)), (index.exact, HEAD_DIM)):
        found = search(query, tier.entries(), 6)
        weights = loop.weights(query.tolist(), keys, read, LAYER.scaling)
        assert_best(found.pages, loop.scores(weights, LAYER.kv_heads), 6)
        for h, own in enumerate(weights):
            chosen = [entry for entry in found.pages[h // 2].tolist() if entry >= 0]
            assert float(found.share[h]) == pytest.approx(loop.share(own, chosen), rel=1e-4)
        for k, values in enumerate(tier.values):
            mean = loop.mean_value(values.tolist(), HEAD_DIM)
            assert found.mean[k].tolist() == pytest.approx(mean, rel=1e-4, abs=1e-5)


def test_head_without_selected_mass_has_a_share_near_zero() -> None:
    layer = a_layer(kv_heads=1, group=2)
    tier, index = Tier(layer), SparQ().index(layer)
    tier.grow((2,))
    query = torch.zeros(2, HEAD_DIM)
    query[:, 0] = torch.tensor([1.0, -1.0])
    tier.keys[0] = torch.tensor([[1000.0], [-1000.0]]) * query[:1].sign()
    index.add(tier.entries())
    found = index.find(query, tier.entries(), 1)
    assert found.pages.tolist() == [[0]]
    assert 0 < float(found.share[1]) < 1e-30


def test_zero_channels_are_refused() -> None:
    with pytest.raises(BadParameter, match="sparq.channels must be at least 1, got 0"):
        SparQ(channels=0)
