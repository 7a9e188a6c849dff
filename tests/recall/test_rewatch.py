"""Re-selection equals the loop: by the latest queries, every few steps, from all entries."""

from __future__ import annotations

import pytest
import torch

from builders import HEAD_DIM, a_layer
from index_recall import assert_best, keys_of
from larder.core import BadParameter, FetchMode
from larder.recall import Rewatch
from references import rewatch as loop
from references.recalling import attention, of_groups
from slow_tiers import Tier

LAYER = a_layer(kv_heads=2, group=2)


def test_choices_are_the_loops_and_stand() -> None:
    tier, index = Tier(LAYER, 2), Rewatch(every=3).index(LAYER)
    tier.grow((30, 22))
    index.add(tier.entries())
    said, found = [], []
    for _ in range(8):
        said.append(tier.queries())
        index.observe_step(said[-1], tier.entries())
        found.append(index.find(said[-1], tier.entries(), 5).pages)
    for step, made in enumerate(loop.standing(3, 8)):
        assert torch.equal(found[step], found[made])
        rows = [queries.tolist() for queries in said[max(0, made - 2) : made + 1]]
        each = [of_groups(attention(row, keys_of(tier), LAYER.scaling), 2) for row in rows]
        total = [[sum(n) for n in zip(*(one[k] for one in each), strict=True)] for k in range(2)]
        assert_best(found[made], total, 5)
        best = loop.chosen(rows, keys_of(tier), 1, LAYER.scaling)
        assert [row[:1] for row in found[made].tolist()] == best


def test_an_entry_that_was_left_out_returns_once_it_is_attended_to() -> None:
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


def test_parameters() -> None:
    with pytest.raises(BadParameter, match="rewatch.every must be at least 1 step, got 0"):
        Rewatch(every=0)
    with pytest.raises(BadParameter, match="rewatch.fetch must be in_turn, got ahead"):
        Rewatch(fetch=FetchMode.AHEAD)
