"""Bounds equal the loop, and bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer
from index_recall import assert_best, built, keys_of
from larder.core import BadParameter
from larder.recall import Bounds, PageSummary
from references import bounds as loop
from references import flat

LAYER = a_layer(kv_heads=2, group=2)
LENGTHS = st.tuples(st.integers(0, 40), st.integers(0, 40))


@settings(max_examples=30)
@given(
    growths=st.lists(LENGTHS, min_size=1, max_size=3),
    page=st.sampled_from([1, 3, 8]),
    digest=st.sampled_from(PageSummary),
    count=st.sampled_from([1, 4, 100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_index_equals_its_reference(growths, page, digest, count, dtype, seed) -> None:
    tier, index = built(Bounds(page=page, digest=digest), LAYER, growths, seed, dtype)
    query = tier.queries()
    scores = loop.scores(query.tolist(), keys_of(tier), page, digest.value)
    assert_best(index.find(query, tier.entries(), count).pages, scores, count)


def test_quest_bound_covers_every_key_of_its_page() -> None:
    tier, index = built(Bounds(page=4), LAYER, [(30, 9)])
    for query in (tier.queries() for _ in range(10)):
        exact = [flat.bests(own, keys_of(tier)[h // 2], 4) for h, own in enumerate(query.tolist())]
        bounds = loop.scores(query.tolist(), keys_of(tier), 4, "quest")
        for most, best in zip(bounds, exact, strict=True):
            assert all(a >= b - 1e-6 for a, b in zip(most, best, strict=True))
        assert_best(index.exact(query, tier.entries(), 3).pages, exact, 3)


def test_arkvale_shares_pages_between_equally_long_heads() -> None:
    tier, index = built(Bounds(page=4, digest=PageSummary.ARKVALE), LAYER, [(40, 40)])
    for search in (index.find, index.exact):
        pages = search(tier.queries(), tier.entries(), 3).pages
        assert pages.shape == (2, 3)
        assert torch.equal(pages[0], pages[1])


def test_empty_page_is_refused() -> None:
    with pytest.raises(BadParameter, match="bounds.page must be at least 1 entry, got 0"):
        Bounds(page=0)
