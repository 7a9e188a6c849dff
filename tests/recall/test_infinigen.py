"""InfiniGen equals the loop: skewed channels, how many entries are near, and which."""

from __future__ import annotations

import pytest
import torch

from builders import HEAD_DIM, a_layer
from index_recall import keys_of
from larder.core import BadParameter
from larder.recall import InfiniGen, InfiniGenIndex
from references import infinigen as loop
from slow_tiers import Tier

LAYER = a_layer(kv_heads=2, group=2)


def built(part: InfiniGen, counts: tuple[int, int], seed: int = 0) -> tuple[Tier, InfiniGenIndex]:
    tier, index = Tier(LAYER, seed), part.index(LAYER)
    tier.grow(counts)
    index.add(tier.entries(), torch.stack([tier.queries() for _ in range(20)], 1))
    return tier, index


def test_mean_count_loses_its_fraction() -> None:
    """Two heads of which 2 and 3 entries are near the largest fetch 2."""
    rows = [[5.0, 4.5, 0.0, 0.0], [5.0, 4.5, 4.1, 0.0]]
    assert loop.number(rows, 1.0, 4) == 2
    layer = a_layer(kv_heads=1, group=2)
    index = InfiniGen(alpha=1.0, most=1.0).index(layer)
    tier = Tier(layer)
    tier.grow((4,))
    index.add(tier.entries())
    assert int((index._result(torch.tensor(rows), 3).pages >= 0).sum()) == 2


@pytest.mark.parametrize("alpha", [0.5, 2.0, 100.0])
@pytest.mark.parametrize("count", [4, 25])
def test_index_with_all_channels_equals_its_reference(alpha, count) -> None:
    part = InfiniGen(channels=1.0, alpha=alpha, most=0.5)
    tier, index = built(part, (40, 31), 1)
    tier.grow((3, 0))
    index.add(tier.entries())
    query = tier.queries()
    rows = loop.logits(query.tolist(), keys_of(tier), LAYER.scaling)
    fetched = loop.number(rows, alpha, 21)
    expected = loop.chosen(rows, 2, fetched, count)
    for search in (index.find, index.exact):
        pages = search(query, tier.entries(), count).pages.tolist()
        assert [[page for page in row if page >= 0] for row in pages] == expected


def test_channels_are_those_with_the_largest_queries() -> None:
    """Queries along one direction leave one channel, which has all of their products."""
    part, tier = InfiniGen(channels=1 / HEAD_DIM, most=1.0), Tier(LAYER, 3)
    tier.grow((30, 30))
    ways = torch.randn(2, HEAD_DIM)
    rows = ways.repeat_interleave(2, 0)[:, None] * torch.randn(4, 9, 1)
    index = part.index(LAYER)
    index.add(tier.entries(), rows)
    query = ways.repeat_interleave(2, 0)
    found, exact = (look(query, tier.entries(), 29) for look in (index.find, index.exact))
    logits = torch.tensor(loop.logits(query.tolist(), keys_of(tier), LAYER.scaling))[::2]
    there, best = (logits.gather(1, pages.pages) for pages in (found, exact))
    torch.testing.assert_close(there, best)  # the same pages, but for ties within rounding


def test_fetched_entries_are_limited_to_a_share() -> None:
    tier, index = built(InfiniGen(alpha=1000.0), (100, 100))
    assert (index.find(tier.queries(), tier.entries(), 90).pages >= 0).sum(1).tolist() == [20, 20]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"channels": 0.0}, r"infinigen.channels must be a share in \(0, 1\], got 0.0"),
        ({"most": 1.1}, r"infinigen.most must be a share in \(0, 1\], got 1.1"),
        ({"alpha": -1.0}, "infinigen.alpha must be 0 or more, got -1.0"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong, message) -> None:
    with pytest.raises(BadParameter, match=message):
        InfiniGen(**wrong)
