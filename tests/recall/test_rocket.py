"""RocketKV's second stage equals the loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import HEAD_DIM, a_layer
from index_recall import assert_best, built, keys_of
from larder.core import BadParameter
from larder.recall import Rocket
from references import flat
from references import rocket as loop
from references.recalling import of_groups, softmax

LAYER = a_layer(kv_heads=2, group=2)


@settings(max_examples=25)
@given(
    growths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=3),
    ratio=st.sampled_from([1.0, 1.5, 2.0, 4.0, 8.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_index_equals_its_reference(growths, ratio, dtype, seed) -> None:
    part = Rocket(ratio=ratio)
    tier, index = built(part, LAYER, growths, seed, dtype)
    assert part.page == loop.sizes(ratio, HEAD_DIM)[0]
    query, keys = tier.queries(), keys_of(tier)
    scores = loop.scores(query.tolist(), keys, ratio, LAYER.scaling)
    assert_best(index.find(query, tier.entries(), 4).pages, scores, 4)
    exact = [
        softmax([LAYER.scaling * best for best in flat.bests(own, keys[h // 2], part.page)])
        for h, own in enumerate(query.tolist())
    ]
    assert_best(index.exact(query, tier.entries(), 4).pages, of_groups(exact, 2), 4)


@pytest.mark.parametrize("ratio", [0.5, 0.0, -1.0, math.inf, math.nan])
def test_ratio_below_one_is_refused(ratio) -> None:
    for tokens in (None, 16):
        with pytest.raises(BadParameter, match="rocket.ratio must be at least 1, got"):
            Rocket(tokens=tokens, ratio=ratio)
