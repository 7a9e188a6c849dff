"""Slots of the fast tier for pages: what the budget has room for, and no more than there are."""

from __future__ import annotations

import pytest
import torch

from builders import a_layer, a_plan, draw
from cache_stores import append, assert_close, extend
from larder.cache.forms.tiered import TieredLayer
from larder.core.ledger import Ledger
from larder.core.recall import OffloadSpec, RecallPart
from larder.ops.attention import merge_attention, ragged_attention
from larder.recall.bounds import Bounds
from larder.recall.flat import Flat

LAYER = a_layer(2, 2)  # two query heads per kv head
ROW = 2 * 8 * 4 + 4  # a key, a value, a bias


def a_store(recall: RecallPart, count: int) -> TieredLayer:
    store = TieredLayer(LAYER, torch.float32, torch.device("cpu"), Ledger(), OffloadSpec(recall))
    append(store, draw(LAYER, count))
    store.apply(a_plan([[count - 1]] * 2, list(store.lengths)))
    return store


def rows(store: TieredLayer) -> int:
    """Of keys in the slots."""
    assert store.finder._pool is not None
    return len(store.finder._pool.own_tensors()[0])


def test_a_short_text_has_slots_for_its_pages_only_and_more_as_it_grows() -> None:
    store = a_store(Flat(tokens=80, page=4, dense=0), 13)
    assert store.foreseen_bytes >= 2 * 12 * ROW  # the index knows nothing yet
    extend(store, draw(LAYER, 1, 13))
    assert rows(store) == 2 * 3 * 4
    asked, moved = store.pages
    assert asked == moved == 6
    store.apply(a_plan([[1]] * 2, [2, 2]))
    extend(store, draw(LAYER, 1, 14))  # 13 are parked, on four pages
    assert (rows(store), store.pages) == (2 * 6 * 4, (14, 14))
    assert store.foreseen_bytes == 0
    append(store, draw(LAYER, 400, 15))
    store.apply(a_plan([[401]] * 2, [402, 402]))
    extend(store, draw(LAYER, 1, 415))
    assert rows(store) == 2 * 80


@pytest.mark.parametrize(("tokens", "held"), [(4, 2 * 4), (8, 4 * 4), (12, 4 * 4), (16, 4 * 8)])
def test_query_heads_that_choose_for_themselves_share_the_slots_of_a_kv_head(tokens, held) -> None:
    store = a_store(Bounds(tokens=tokens, page=4, dense=0), 60)
    extend(store, draw(LAYER, 1, 60))
    assert rows(store) == held <= 2 * tokens


def test_a_page_for_two_query_heads_is_the_first_ones_best() -> None:
    store = a_store(Bounds(tokens=4, page=4, dense=0), 60)
    new, fast, parked = draw(LAYER, 1, 60), store.entries(), store.parked()
    index = Bounds(tokens=4, page=4, dense=0).index(LAYER)
    index.add(parked)
    best = index.find(new.queries[:, 0], parked, 1).pages[::2, 0].tolist()
    keys, values = (
        [torch.cat([held[fast.rows(h)], far[parked.rows(h)][4 * best[h] : 4 * best[h] + 4], own[h]])
         for h in range(2)]
        for held, far, own in (
            (fast.keys, parked.keys, new.keys), (fast.values, parked.values, new.values)
        )
    )  # fmt: skip
    layout = torch.tensor([0, len(keys[0])]), torch.tensor([len(part) for part in keys])
    part = ragged_attention(new.queries, torch.cat(keys), torch.cat(values), *layout, LAYER.scaling)
    assert_close(extend(store, new), merge_attention([part[0]], [part[1]])[0])
