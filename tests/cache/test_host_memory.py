"""Host memory of parked entries and their index: counted, and refused before it is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import a_layer, a_plan, a_spec, draw, layer_options
from cache_stores import append, extend
from larder.cache import HostMemoryBudget, SequenceCache, TieredLayer
from larder.core import BudgetError, OffloadSpec, RecallPart
from larder.recall import PQ, Bounds, Dci, Flat

LAYER = a_layer(2, 2)
PARTS = {
    "pq": PQ(tokens=4, dense=0),
    "bounds": Bounds(tokens=8, page=4, dense=0),
    "dci": Dci(tokens=8, page=4, dense=0),
}
ROOMY = 1 << 30


def a_store(recall: RecallPart, limit: int | None = None) -> tuple[TieredLayer, HostMemoryBudget]:
    store = TieredLayer(LAYER, layer_options(parking=OffloadSpec(recall)))
    room = HostMemoryBudget(limit)
    store.join(room)
    return store, room


def park(store: TieredLayer, count: int, start: int = 0) -> None:
    append(store, draw(LAYER, count, start))
    last = [length - 1 for length in store.lengths]
    store.apply(a_plan([[n] for n in last], list(store.lengths)))


def test_plan_beyond_the_host_budget_is_refused_unchanged() -> None:
    wide = a_layer(2, 1)
    spec = a_spec(wide, replace(wide, index=1))
    cache = SequenceCache(spec, "tiered", parking=OffloadSpec(Flat(tokens=4, dense=0), 1))
    for layer in (0, 1):
        append(cache._layers[layer], draw(wide, 9000))
    before = cache.nbytes
    with pytest.raises(BudgetError, match="raise park"):
        cache.apply(0, a_plan([[8999], [8999]], [9000, 9000]))
    assert (cache.nbytes, cache.plans) == (before, 0)
    assert cache.lengths()[0] == (9000, 9000)


def test_request_beyond_available_host_memory_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("larder.cache.offload.host_memory._available_bytes", lambda: 1000)
    with pytest.raises(BudgetError, match="available"):
        HostMemoryBudget().check(2000)


@pytest.mark.parametrize("name", PARTS)
def test_index_bytes_are_estimated_and_refused_beyond_the_budget(name) -> None:
    store, room = a_store(PARTS[name], ROOMY)
    foreseen = store._index_bytes(2 * 3000)
    park(store, 3000)
    entries = room.used
    extend(store, draw(LAYER, 1, 3000))
    index = room.used - entries
    assert 0.5 * foreseen < index < 1.5 * foreseen
    other, tight = a_store(PARTS[name], entries + index // 3)
    with pytest.raises(BudgetError, match="and their index"):
        park(other, 3000)
    assert len(other.parked().positions) == tight.used - other.fetcher.shared_index.nbytes - 48 == 0


def test_index_growth_is_estimated_from_its_size() -> None:
    store, _ = a_store(PARTS["bounds"], ROOMY)
    park(store, 2000)
    extend(store, draw(LAYER, 1, 2000))
    held = store.fetcher.shared_index.nbytes
    index = store.fetcher.shared_index
    assert store._index_bytes(index.indexed[0]) == pytest.approx(held / 2, abs=1)


def test_deleted_stores_release_host_memory() -> None:
    store, room = a_store(Flat(tokens=4, dense=0))
    park(store, 10)
    assert room.used == store.host_nbytes > 0
    fork = store.fork()
    fork.join(room)
    assert room.used == store.host_nbytes + fork.host_nbytes
    del fork
    assert room.used == store.host_nbytes
