"""Two sizes of pages: bounds hold, are tighter than those of pages, and choices stand."""

from __future__ import annotations

import pytest

from builders import a_layer
from index_recall import built, keys_of
from larder.core import BadParameter
from larder.recall import LServe
from references import lserve as loop

LAYER = a_layer(kv_heads=2, group=2)


def test_no_product_exceeds_the_bound_of_its_page() -> None:
    tier, index = built(LServe(page=8, part=4), LAYER, [(40, 21)])
    query = tier.queries()
    bounds = index._bounds(query)
    for h, own in enumerate(query.tolist()):
        keys = keys_of(tier)[h // 2]
        assert loop.holds(own, keys, 8, 4)
        expected = loop.bounds(own, keys, 8, 4)
        assert bounds[h, : len(expected)].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
        loose = loop.bounds(own, keys, 8, 8)
        assert all(part <= page for part, page in zip(expected, loose, strict=True))


def test_selection_is_reused_for_four_steps() -> None:
    tier, index = built(LServe(page=4, part=2, keep=4), LAYER, [(60, 60)])
    found = [index.find(tier.queries(), tier.entries(), 5).pages.tolist() for _ in range(9)]
    assert found[0] == found[1] == found[2] == found[3]
    assert found[4] == found[5] == found[6] == found[7]
    assert found[3] != found[4] != found[8]


def test_newest_page_is_always_fetched() -> None:
    tier, index = built(LServe(page=4, part=2, keep=100), LAYER, [(40, 40)])
    for _ in range(6):
        tier.grow((3, 2))
        index.add(tier.entries())
        pages = index.find(tier.queries(), tier.entries(), 4).pages
        for row, count in zip(pages.tolist(), index.counts, strict=True):
            assert count - 1 in row


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"part": 15}, "lserve.part must divide the page of 64 entries, got 15"),
        ({"part": 0}, "lserve.part must divide the page of 64 entries, got 0"),
        ({"keep": 0}, "lserve.keep must be at least 1 step, got 0"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong, message) -> None:
    with pytest.raises(BadParameter, match=message):
        LServe(**wrong)
