"""MPCache equals the loop, from coarse to fine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer
from index_recall import assert_best, built, keys_of
from larder.core import BadParameter
from larder.recall import MPCache
from references import flat
from references import mpcache as loop
from slow_tiers import Tier

LAYER = a_layer(kv_heads=2, group=2)


@settings(max_examples=25)
@given(
    growths=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=3),
    page=st.sampled_from([1, 3]),
    coarse=st.sampled_from([1, 2, 5]),
    kept=st.sampled_from([0.1, 0.4, 1.0]),
    count=st.sampled_from([1, 4, 100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_index_equals_its_reference(growths, page, coarse, kept, count, dtype, seed) -> None:
    part = MPCache(page=page, coarse=coarse, kept=kept)
    tier, index = built(part, LAYER, growths, seed, dtype)
    query, keys = tier.queries(), keys_of(tier)
    found = index.find(query, tier.entries(), count).pages.tolist()
    for h, own in enumerate(query.tolist()):
        scores = loop.scores(own, keys[h // 2], page, coarse, kept, 0.6, count)
        result = [scores[number] for number in found[h] if number >= 0]
        best = sorted(scores.values(), reverse=True)[:count]
        assert result == pytest.approx(best, rel=1e-4, abs=1e-4)
    exact = [flat.bests(own, keys[h // 2], page) for h, own in enumerate(query.tolist())]
    assert_best(index.exact(query, tier.entries(), count).pages, exact, count)


def test_short_head_searches_a_bounded_number_of_clusters() -> None:
    tier = Tier(LAYER)
    tier.grow((60, 8))
    for head, heights in enumerate(([0.0] * 60, [5.0, -20.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0])):
        tier.keys[head] = torch.zeros(len(heights), LAYER.head_dim)
        tier.keys[head][:, 0] = torch.tensor(heights)
    index = MPCache(page=1, coarse=2, kept=0.1).index(LAYER)
    index.add(tier.entries())
    query = torch.zeros(LAYER.query_heads, LAYER.head_dim)
    query[:, 0] = 1.0
    assert index.find(query, tier.entries(), 1).pages[2:].tolist() == [[6], [6]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"page": 0}, "mpcache.page must be at least 1 entry, got 0"),
        ({"coarse": 0}, "mpcache.coarse must be at least 1 page, got 0"),
        ({"kept": 0.0}, r"mpcache.kept must be in \(0, 1\], got 0.0"),
        ({"slant": 1.5}, r"mpcache.slant must be in \[0, 1\], got 1.5"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong, message) -> None:
    with pytest.raises(BadParameter, match=message):
        MPCache(**wrong)
