"""Slots of the fast tier for pages: what the budget has room for, and no more than there are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer, a_plan, draw, layer_options
from cache_stores import append, assert_close, extend
from larder.cache import PagePool, TieredLayer
from larder.core import Entries, OffloadSpec, RecallPart
from larder.ops import merge_attention, ragged_attention
from larder.ops.cpu import page_slots
from larder.recall import Bounds, Flat

LAYER = a_layer(2, 2)  # two query heads per kv head
ROW = 2 * 8 * 4 + 4  # a key, a value, a bias


def a_store(recall: RecallPart, count: int) -> TieredLayer:
    store = TieredLayer(LAYER, layer_options(parking=OffloadSpec(recall)))
    append(store, draw(LAYER, count))
    store.apply(a_plan([[count - 1]] * 2, list(store.lengths)))
    return store


def rows(store: TieredLayer) -> int:
    """Of keys in the slots."""
    assert store.fetcher._pool is not None
    return len(store.fetcher._pool.own_tensors()[0])


def test_page_slots_grow_with_the_text() -> None:
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
def test_query_heads_share_the_page_slots_of_their_kv_head(tokens, held) -> None:
    store = a_store(Bounds(tokens=tokens, page=4, dense=0), 60)
    extend(store, draw(LAYER, 1, 60))
    assert rows(store) == held <= 2 * tokens


def test_page_of_two_query_heads_is_loaded_once() -> None:
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


@settings(max_examples=30)
@given(sets=st.sampled_from([2, 4]), slots=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_page_load_kernel_equals_the_python_loads(sets, slots, seed) -> None:
    source = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, 2 * 40, LAYER.head_dim, generator=source)
    entries = Entries(*rows, torch.arange(40).repeat(2).int(), (0, 40), (40, 40))
    place = torch.float32, torch.device("cpu")
    pools = [PagePool(LAYER, sets, slots, 4, *place) for _ in range(2)]
    for _ in range(4):
        width = int(torch.randint(0, slots + 1, (1,), generator=source))
        orders = [torch.randperm(9, generator=source)[:width] for _ in range(sets)]
        pages = torch.stack(orders)
        for row in pages[1:]:
            row[int(torch.randint(0, width + 1, (1,), generator=source)) :] = -1
        versions = torch.randint(0, 2, pages.shape, generator=source)
        numbers = torch.randint(0, 40, (*pages.shape, 4), generator=source)
        numbers[..., int(torch.randint(1, 5, (1,), generator=source)) :] = -1
        pools[0].load(pages, versions, numbers, entries)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(page_slots, "supports", lambda *_: False)
            pools[1].load(pages, versions, numbers, entries)
        assert pools[0].requested == pools[1].requested and pools[0].moved == pools[1].moved
        ours, theirs = (pool.own_tensors() for pool in pools)
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
