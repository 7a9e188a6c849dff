"""Flat equals the loop, and head rules equal what they say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer
from larder.core import BadParameter
from larder.recall import Flat, QueryHeadRule, select_pages
from references import flat as loop
from slow_tiers import Tier

LAYER = a_layer(kv_heads=2, group=2)


@settings(max_examples=40)
@given(
    lengths=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    page=st.sampled_from([1, 3, 16]),
    count=st.sampled_from([1, 4, 100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_index_equals_its_reference(lengths, page, count, dtype, seed) -> None:
    tier = Tier(LAYER, seed, dtype)
    tier.grow(lengths)
    index = Flat(page=page).index(LAYER)
    index.add(tier.entries())
    query = (4 * tier.queries()).round() / 4  # so that sums are exact, and ties are
    tier.keys = [(4 * keys.float()).round().to(dtype) / 4 for keys in tier.keys]
    found = index.find(query, tier.entries(), count).pages
    wanted = loop.find(query.tolist(), [keys.tolist() for keys in tier.keys], page, count)
    assert [[n for n in row if n >= 0] for row in found.tolist()] == wanted


def test_unindexed_entries_are_not_found() -> None:
    tier = Tier(LAYER)
    tier.grow((10, 10))
    index = Flat().index(LAYER)
    index.add(tier.entries())
    tier.grow((10, 10), scale=9.0)
    assert int(index.find(tier.queries(), tier.entries(), 40).pages.max()) < 10


SCORES = torch.tensor(
    [[5.0, 0.0, 1.0, 2.0], [4.0, 6.0, 1.0, 0.0], [9.0, 0.0, 0.0, -torch.inf], [0.0] * 4]
)
SCORES[3, 3] = -torch.inf


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ("own", [[0, 3, 2], [1, 0, 2], [0, 1, 2], [0, 1, 2]]),
        ("interleaved", [[0, 1, 3], [0, 1, 2]]),
        ("sum", [[0, 1, 2], [0, 1, 2]]),
        ("mean", [[0, 1, 2], [0, 1, 2]]),
        ("max", [[1, 0, 3], [0, 1, 2]]),
        ("layer_sum", [[0, 1, 2], [0, 1, 2]]),
        ("layer_mean", [[0, 1, 3], [0, 1, 2]]),
        ("layer_max", [[0, 1, 3], [0, 1, 2]]),
    ],
)
def test_query_head_rules_hand_values(rule, wanted) -> None:
    assert select_pages(SCORES, 2, QueryHeadRule(rule), 3).tolist() == wanted


def test_empty_page_is_refused() -> None:
    with pytest.raises(BadParameter, match="flat.page must be at least 1 entry, got 0"):
        Flat(page=0)
