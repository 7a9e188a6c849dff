"""Re-selection equals the loop: by the latest queries, every few steps, from all entries."""

from __future__ import annotations

import pytest
import torch

from builders import HEAD_DIM, a_layer, draw, layer_options
from cache_stores import append, extend
from index_recall import assert_best, keys_of
from larder.cache import TieredLayer
from larder.core import AppendKind, BadParameter, FetchMode, OffloadSpec, Plan
from larder.recall import Rewatch
from references import rewatch as loop
from references.recalling import attention, of_groups
from slow_tiers import Tier

LAYER = a_layer(kv_heads=2, group=2)


def test_selections_equal_the_reference_and_persist() -> None:
    tier, index = Tier(LAYER, 2), Rewatch(every=3).index(LAYER)
    tier.grow((30, 22))
    index.add(tier.entries())
    step_queries, found = [], []
    for _ in range(8):
        step_queries.append(tier.queries())
        index.observe_step(step_queries[-1], tier.entries())
        found.append(index.find(step_queries[-1], tier.entries(), 5).pages)
    for step, made in enumerate(loop.standing(3, 8)):
        assert torch.equal(found[step], found[made])
        rows = [queries.tolist() for queries in step_queries[max(0, made - 2) : made + 1]]
        each = [of_groups(attention(row, keys_of(tier), LAYER.scaling), 2) for row in rows]
        total = [[sum(n) for n in zip(*(one[k] for one in each), strict=True)] for k in range(2)]
        assert_best(found[made], total, 5)
        best = loop.chosen(rows, keys_of(tier), 1, LAYER.scaling)
        assert [row[:1] for row in found[made].tolist()] == best


def test_unselected_entry_returns_after_attention() -> None:
    layer = a_layer(kv_heads=1, group=1)
    tier, index = Tier(layer), Rewatch(every=16).index(layer)
    tier.grow((40,))
    tier.keys[0] = torch.zeros(40, HEAD_DIM)
    tier.keys[0][7, 0], tier.keys[0][9, 1] = 20.0, 20.0
    index.add(tier.entries())
    found = []
    for step in range(33):
        query = torch.zeros(1, HEAD_DIM)
        query[0, 1 if 1 <= step <= 16 else 0] = 5.0
        index.observe_step(query, tier.entries())
        found.append(index.find(query, tier.entries(), 1).pages.tolist())
    assert found[0] == found[15] == [[7]]
    assert found[16] == found[31] == [[9]]
    assert found[32] == [[7]]


def test_question_starts_a_new_selection() -> None:
    tier, index = Tier(LAYER, 3), Rewatch(every=4).index(LAYER)
    tier.grow((30, 22))
    index.add(tier.entries())
    step_queries = [
        tier.queries() for _ in range(9)
    ]  # 5 are read, 3 steps, and 1 more after a question
    before = torch.stack(step_queries[:5], 1)
    for step, queries in enumerate(step_queries[5:8]):
        index.observe_step(
            queries, tier.entries(), torch.cat([before, *_rows(step_queries[5 : 5 + step])], 1)
        )
        found = index.find(queries, tier.entries(), 5).pages
        assert_choice(found, tier, step_queries[2:6])  # the first step's, with three that were read
    question = [tier.queries() for _ in range(2)]
    before = torch.cat([before, *_rows(step_queries[5:8] + question)], 1)
    index.observe_step(step_queries[8], tier.entries(), before)
    found = index.find(step_queries[8], tier.entries(), 5).pages
    assert_choice(found, tier, [step_queries[7], *question, step_queries[8]])


def _rows(step_queries: list[torch.Tensor]) -> list[torch.Tensor]:
    return [queries[:, None] for queries in step_queries]


def assert_choice(found: torch.Tensor, tier: Tier, step_queries: list[torch.Tensor]) -> None:
    each = [of_groups(attention(q.tolist(), keys_of(tier), LAYER.scaling), 2) for q in step_queries]
    total = [[sum(n) for n in zip(*(one[k] for one in each), strict=True)] for k in range(2)]
    assert_best(found, total, 5)


def test_layer_passes_the_queries_of_a_question() -> None:
    spec = OffloadSpec(Rewatch(tokens=8, dense=0))
    store = TieredLayer(a_layer(2, 2), layer_options(parking=spec))
    text, question, step = draw(LAYER, 40, 0, 0), draw(LAYER, 20, 40, 1), draw(LAYER, 1, 60, 2)
    append(store, text)
    store.apply(Plan.from_mask(torch.arange(80) % 40 >= 35, store.lengths))
    twin = store.fork()  # which has indexed the text
    for one in (store, twin):
        for new in (question, step):
            one.expect(AppendKind.QUESTION if new is question else AppendKind.STEP)
            extend(one, new)
        latest = one.fetcher.shared_index.index.state()["latest"]
        assert torch.equal(latest, torch.cat([question.queries[:, -15:], step.queries], 1))


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(BadParameter, match="rewatch.every must be at least 1 step, got 0"):
        Rewatch(every=0)
    with pytest.raises(BadParameter, match="rewatch.fetch must be in_turn, got ahead"):
        Rewatch(fetch=FetchMode.AHEAD)
