"""A decode step over recalled entries in one kernel call equals search, loading and attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from builders import Tokens, a_layer, a_plan, draw, layer_options
from cache_stores import append, extend
from larder.cache import PageFetcher, PagePool, RoomNeeded, TieredLayer
from larder.cache.offload import page_fetch, page_pool
from larder.core import (
    LOG_COUNT,
    Codec,
    FetchMode,
    LayerSpec,
    Ledger,
    OffloadSpec,
    SearchMode,
    Variant,
)
from larder.ops import c_library
from larder.ops.cpu import recall_step
from larder.recall import Dci, DciIndex, Flat

pytestmark = pytest.mark.skipif(c_library() is None, reason="needs the C kernels")


@contextmanager
def one_call(takes: bool) -> Iterator[None]:
    """Steps by one call where they can, or by three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_fetch, "AMORTIZED_ENTRIES", 16)  # some entries wait for their turn
        if not takes:
            patch.setattr(PageFetcher, "takes_one_call", lambda *_: False)
        yield


def a_store(layer: LayerSpec, recall: Dci, dtype: torch.dtype, columns: tuple[str, ...]):
    options = layer_options(dtype=dtype, ledger=Ledger(columns), parking=OffloadSpec(recall))
    return TieredLayer(layer, options)


def offload(store: TieredLayer, source: Random) -> None:
    """Offload any entries of each head, other numbers of them, but not the latest."""
    chosen = [
        sorted({*source.sample(range(n - 1), source.randint(0, min(n - 1, 6))), n - 1})
        for n in store.lengths
    ]
    store.apply(a_plan(chosen, list(store.lengths)))


def held(store: TieredLayer) -> list[Tensor]:
    """Slots and their tables, the pages of the latest step, and the counters."""
    pool = store.fetcher._pool
    own = [] if pool is None else [tensor.clone() for tensor in pool.own_tensors()]
    chosen = store.fetcher.selection
    if chosen is not None:
        own += [chosen.pages, chosen.versions, chosen.numbers, torch.tensor(chosen.lengths)]
    return [*own, torch.tensor(store.pages), torch.tensor(store.nbytes)]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)
    )


def stepped(store: TieredLayer, new: Tokens, takes: bool) -> list[Tensor]:
    """Output of a step, recorded logits, and what the store holds then."""
    with one_call(takes):
        out = extend(store, new)
    logits = store.take_logits()
    rows = torch.cat([torch.arange(*rows.indices(1 << 20)) for rows in resident_rows(store)])
    return [out, *([] if logits is None else [logits[:, rows]]), *held(store)]


def resident_rows(store: TieredLayer) -> list[slice]:
    entries = store.entries()
    return [entries.rows(head) for head in range(len(entries.lengths))]


LAYERS = [a_layer(2, 2), a_layer(3, 1), LayerSpec(0, 4, 1, 24, 0.3)]


@settings(max_examples=40)
@given(
    layer=st.sampled_from(LAYERS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    recall=st.builds(
        Dci,
        tokens=st.sampled_from([4, 12, 64, 400]),
        page=st.just(4),
        dense=st.just(0),
        variant=st.sampled_from([Variant.LARDER, Variant.CODE]),
        beam=st.sampled_from([0, 2]),
    ),
    seed=st.integers(0, 2**31),
)
def test_one_call_equals_three(layer, dtype, recall, seed) -> None:
    source, columns = Random(seed), ("mass", LOG_COUNT)[: seed % 3]
    stores = [a_store(layer, recall, dtype, columns) for _ in range(2)]
    position = 0
    for _ in range(6):
        count = source.randint(2, 40)
        for store, way in zip(stores, (Random(seed), Random(seed)), strict=True):
            append(store, draw(layer, count, position, seed, dtype))
            offload(store, way)
        position += count
        for _ in range(source.randint(1, 3)):
            new, records = draw(layer, 1, position, seed + 1, dtype), source.random() < 0.5
            for store in stores:
                if records:
                    store.record_logits()
            ours, theirs = (
                stepped(store, new, takes)
                for store, takes in zip(stores, (True, False), strict=True)
            )
            position += 1
            assert same(ours, theirs)
        if source.random() < 0.3:
            stores = [store.fork() for store in stores]


def two_stores(recall: Dci, count: int = 80) -> tuple[TieredLayer, TieredLayer]:
    """Stores with the same offloaded entries."""
    layer = LAYERS[0]
    stores = [a_store(layer, recall, torch.float32, ()) for _ in range(2)]
    for store in stores:
        append(store, draw(layer, count))
        offload(store, Random(0))
    return stores[0], stores[1]


def raise_memory_error(*given: object, **options: object) -> None:
    raise MemoryError


def test_attention_that_fails_leaves_the_pages_loaded(monkeypatch) -> None:
    ours, theirs = two_stores(Dci(tokens=12, page=4, dense=0))
    for takes, store in ((True, ours), (False, theirs)):
        stepped(store, draw(LAYERS[0], 1, 80), takes)
    kernel = recall_step.recall_step
    for takes, store in ((True, ours), (False, theirs)):
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(
                recall_step,
                "recall_step",
                lambda *given: kernel(*given)._replace(outcome=recall_step.NO_MEMORY),
            )
            patch.setattr(page_pool, "ragged_attention", raise_memory_error)
            stepped(store, draw(LAYERS[0], 1, 81), takes)
        store.truncate(81)
    assert ours.pages[0] == 2 * 3 * 2 and same(held(ours), held(theirs))
    new = draw(LAYERS[0], 1, 81, 3)
    assert same(stepped(ours, new, True), stepped(theirs, new, False))


@pytest.mark.parametrize("takes", [True, False])
def test_index_that_fails_leaves_no_selection(monkeypatch, takes) -> None:
    """Its pages are of an index that is empty afterwards."""
    store, twin = two_stores(Dci(tokens=12, page=4, dense=0))
    for own in (store, twin):
        stepped(own, draw(LAYERS[0], 1, 80), takes)
        append(own, draw(LAYERS[0], 20, 81))
        offload(own, Random(1))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(DciIndex, "add", raise_memory_error)
        stepped(store, draw(LAYERS[0], 1, 101), takes)
    assert store.fetcher.selection is None
    store.truncate(101)
    new = draw(LAYERS[0], 1, 101, 3)
    ours, theirs = (stepped(own, new, takes) for own in (store, twin))
    assert torch.isfinite(ours[0]).all() and ours[0].shape == theirs[0].shape


def test_slots_without_room_stay_as_they_were() -> None:
    store, other = two_stores(Dci(tokens=12, page=4, dense=0))
    stepped(store, draw(LAYERS[0], 1, 80), True)
    fetcher, entries = store.fetcher, other.parked()
    pool = PagePool(LAYERS[0], 2, 1, 4, torch.float32, torch.device("cpu"))
    trees, queries = fetcher.shared_index.index.key_trees(3), draw(LAYERS[0], 1, 81).queries
    before = [tensor.clone() for tensor in pool.own_tensors()]
    needed = pool.recall(queries, trees, 3, entries, [])
    assert isinstance(needed, RoomNeeded) and needed.slots == 3
    assert same(before, list(pool.own_tensors())) and pool.requested == pool.moved == 0
    wide = PagePool(LAYERS[0], 2, 3, 4, torch.float32, torch.device("cpu"))
    assert isinstance(wide.recall(queries, trees, 3, entries, []), RoomNeeded)  # of the table
    wide.widen_table(needed.num_pages)
    assert not isinstance(wide.recall(queries, trees, 3, entries, []), RoomNeeded)
    assert wide.requested == wide.moved == 6


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(threads) -> None:
    recall, before = Dci(tokens=64, page=4, dense=0), torch.get_num_threads()
    ours, theirs = two_stores(recall, 600)
    torch.set_num_threads(threads)
    try:
        new = draw(LAYERS[0], 1, 600)
        assert same(stepped(ours, new, True), stepped(theirs, new, False))
    finally:
        torch.set_num_threads(before)
    assert same(held(ours), held(theirs))


DCI = Dci(tokens=12, page=4, dense=0)
OTHERS = {
    "plain": (DCI, LAYERS[0], None),
    "pages of query heads": (replace(DCI, variant=Variant.PAPER), LAYERS[0], None),
    "exact search": (replace(DCI, search=SearchMode.EXACT), LAYERS[0], None),
    "fetched ahead": (replace(DCI, fetch=FetchMode.AHEAD), LAYERS[0], None),
    "read again": (replace(DCI, corrected=1), LAYERS[0], None),
    "shared pages": (replace(DCI, layers=2), LAYERS[0], None),
    "another index": (Flat(tokens=12, page=4, dense=0), LAYERS[0], None),
    "softcap": (DCI, replace(LAYERS[0], softcap=20.0), None),
    "quantized": (DCI, LAYERS[0], Codec(8, 8, group=8)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_steps_take_three_calls(name) -> None:
    recall, layer, codec = OTHERS[name]
    options = layer_options(parking=OffloadSpec(recall, codec=codec))
    store = TieredLayer(layer, options)
    append(store, draw(layer, 80))
    offload(store, Random(0))
    taken = list[bool]()
    takes = PageFetcher.takes_one_call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            PageFetcher, "takes_one_call", lambda *given: taken.append(takes(*given)) or taken[-1]
        )
        extend(store, draw(layer, 1, 80))
    assert taken == [name == "plain"]
    assert store.pages[0]
