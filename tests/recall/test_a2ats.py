"""A2ATS equals the loop: the metric of the queries, codes of unrotated keys, clipped products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import HEAD_DIM, RADIANS, a_layer, draw, layer_options
from larder.cache import NewTokens, TieredLayer
from larder.core import BadParameter, CacheError, Mode, OffloadSpec
from larder.ops import rotate
from larder.recall import A2ats, A2atsIndex, Flat
from references import a2ats as loop
from references.lloyd import dot
from slow_tiers import Tier

LAYER = a_layer(kv_heads=2, group=2)


def built(part: A2ats, counts: tuple[int, int], seed: int = 0) -> tuple[Tier, A2atsIndex, list]:
    tier, index = Tier(LAYER, seed), part.index(LAYER)
    tier.grow(counts)
    asked = torch.stack([tier.queries() for _ in range(9)], 1)
    index.add(tier.entries(), asked)
    return tier, index, asked.tolist()


def unturned(tier: Tier, head: int) -> list[list[float]]:
    keys = tier.keys[head].tolist()
    return [loop.turned(key, -index, RADIANS) for index, key in enumerate(keys)]


def metric(part: A2ats, observed: list, head: int) -> list[list[float]]:
    rows = [row for own in observed[2 * head : 2 * head + 2] for row in own]
    return loop.root(loop.moment([loop.turned(row, part.clip, RADIANS) for row in rows]))


def clipped(query: list[float], at: int, part: A2ats) -> list[float]:
    return loop.turned(query, part.clip - at, RADIANS)


@pytest.mark.parametrize("codes", [5, 100])
@pytest.mark.parametrize("clip", [0, 40])
@pytest.mark.parametrize("count", [4, 12])
def test_index_equals_its_reference(codes: int, clip: int, count: int) -> None:
    part = A2ats(codes=codes, clip=clip, iterations=3)
    tier, index, observed = built(part, (30, 21), codes + clip)
    query, expected = tier.queries(), []
    for head in range(2):
        low = metric(part, observed, head)
        coded = loop.codes(unturned(tier, head), low, codes, 3)
        asked = [clipped(row, 29, part) for row in query[2 * head : 2 * head + 2].tolist()]
        expected.append([[dot(row, code) for code in coded] for row in asked])
    pages = index.find(query, tier.entries(), count).pages.tolist()
    for own, rows in zip(pages, expected, strict=True):
        found, best = [page for page in own if page >= 0], loop.union(rows, count)
        assert len(found) == len(best) == count
        # Entries of one code tie: what is found must score as what the loop finds.
        for row in rows:
            ranks = sorted((round(row[n], 4) for n in found), reverse=True)
            assert ranks == pytest.approx(
                sorted((round(row[n], 4) for n in best), reverse=True), abs=2e-3
            )


def test_product_error_equals_the_metric_error() -> None:
    """Mean squared error of q (k - k') is that of (k - k') L, up to the scale of the moment."""
    queries = torch.randn(50, HEAD_DIM, generator=torch.Generator().manual_seed(3)).tolist()
    low = loop.root(loop.moment(queries, ridge=0.0))
    change = [0.3, -1.0, 0.2, 0.0, 2.0, 0.1, -0.4, 0.7]
    errors = sum(dot(query, change) ** 2 for query in queries)
    sums = sum(
        sum(q[a] * q[b] for q in queries) ** 2 for a in range(HEAD_DIM) for b in range(HEAD_DIM)
    )
    weighed = dot(loop.times(change, low), loop.times(change, low))
    assert weighed * (sums / HEAD_DIM**2) ** 0.5 == pytest.approx(errors)


def test_metric_equals_its_reference() -> None:
    part = A2ats(clip=7)
    _, index, observed = built(part, (12, 3))
    for head in range(2):
        assert index._roots[head].tolist() == [
            pytest.approx(row, abs=1e-5) for row in metric(part, observed, head)
        ]


@pytest.mark.parametrize("count", [1, 9])
def test_fewer_queries_than_dimensions_have_a_metric(count: int) -> None:
    """Where the second moment is singular but for the ridge."""
    layer = replace(a_layer(), head_dim=256, radians=(0.1,) * 128)
    index = A2ats().index(layer)
    for seed in range(5):
        queries = torch.randn(4, count, 256, generator=torch.Generator().manual_seed(seed))
        root = index._metric(queries).double()
        for head, rows in enumerate(index._clipped(queries).view(2, -1, 256).double()):
            moment = rows.mT @ rows
            moment /= moment.square().mean().sqrt()
            assert torch.allclose(root[head] @ root[head].mT, moment, atol=1e-5)


def test_one_code_per_key_ranks_exactly() -> None:
    """And at the true distance, where that is the clipped one."""
    part = A2ats(codes=100, clip=11)
    tier, index, _ = built(part, (40, 40), 5)
    query = tier.queries()
    stays = tier.entries()
    index.observe_step(query, replace(stays, positions=stays.positions + 13))
    pages = index.find(query, tier.entries(), 20).pages
    for head in range(2):
        rows = [
            [dot(clipped(row, 52, part), key) for key in unturned(tier, head)]
            for row in query[2 * head : 2 * head + 2].tolist()
        ]
        assert pages[head].tolist() == loop.union(rows, 20)


def test_later_entries_use_existing_codes_until_a_rebuild() -> None:
    part = A2ats(codes=4)
    tier, index, _ = built(part, (20, 20))
    before = index._centers.clone()
    tier.grow((10, 19))
    index.add(tier.entries())
    assert torch.equal(index._centers, before)
    assert index._made_of.tolist() == [20, 20]
    tier.grow((10, 0))
    index.add(tier.entries())
    assert index._made_of.tolist() == [40, 20]


def test_observed_queries_are_unrotated() -> None:
    part = A2ats(dense=0, tokens=4)
    plain = OffloadSpec(Flat(dense=0, tokens=4))
    tokens = draw(LAYER, 6, start=3)
    rotated = rotate(tokens.queries, tokens.positions, torch.tensor(RADIANS))
    for parking, expected in ((OffloadSpec(part), tokens.queries), (plain, rotated[:, :0])):
        store = TieredLayer(LAYER, layer_options(parking=parking))
        sides = rotated, tokens.keys, tokens.values, tokens.positions
        store.attend(NewTokens(*sides, Mode.APPEND))
        assert torch.allclose(store.state()["observed"], expected, atol=1e-5)


def test_unknown_rotation_is_refused() -> None:
    with pytest.raises(CacheError, match="take a recall part that reads rotated keys"):
        A2ats().index(replace(LAYER, radians=None))


@pytest.mark.parametrize("name", ["codes", "clip", "iterations"])
def test_parameters_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(BadParameter, match=f"a2ats.{name} must be at least"):
        A2ats(**{name: -1})
