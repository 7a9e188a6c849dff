"""Layers in pages of an arena, held against a loop over lists."""

from __future__ import annotations

import gc
from dataclasses import replace
from random import Random

import pytest
import torch

from builders import a_layer, a_plan, a_spec, draw, layer_options, parking_of
from cache_stores import append, assert_close, assert_holds, attend, extend, same
from larder.cache import (
    DenseLayer,
    PageArena,
    PagedLayer,
    RaggedLayer,
    SequenceCache,
    unique_nbytes,
)
from larder.core import CacheError, Folds, LayerSpec, Ledger, Plan
from larder.ops import AttentionBackend
from references.cache.ragged import RaggedLoop

BACKENDS = (AttentionBackend.REFERENCE, AttentionBackend.CPU, AttentionBackend.GATHERED)


def an_arena(
    layer: LayerSpec, num_pages: int = 60, backend: AttentionBackend = AttentionBackend.CPU
) -> PageArena:
    return PageArena(a_spec(layer), num_pages, page_tokens=4, backend=backend)


def a_store(layer: LayerSpec, arena: PageArena) -> PagedLayer:
    spec = replace(a_spec(layer), arena=arena)
    [store] = SequenceCache(spec, "ragged").layers
    assert isinstance(store, PagedLayer)
    return store


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_equal_the_reference(backend, seed) -> None:
    """Blocks, steps, evictions by both ways, forks and scratch texts in any order."""
    source, layer = Random(seed), a_layer(2, 2)
    store, loop, start = a_store(layer, an_arena(layer, backend=backend)), RaggedLoop(layer), 0
    for turn in range(14):
        count = source.choice([1, 1, 1, 3, 9])
        new = draw(layer, count, start, seed)
        expected = attend(loop, new)
        assert_close(attend(store, new), expected)
        assert_close(extend(store, new), expected)
        append(loop, new)
        start += count
        if turn % 3 == 2:
            chosen = [
                sorted(source.sample(range(held), held * source.choice([0, 2, 3]) // 4))
                for held in store.lengths
            ]
            plan = a_plan(chosen, store.lengths)
            (store.apply if source.random() < 0.5 else store.evict)(plan)
            loop.keep(chosen)
        if turn % 5 == 4:
            former, store = store, store.fork()
            extend(former, draw(layer, 2, start, seed + 9))
        assert_holds(store, loop)


@pytest.mark.parametrize("fields", [{"softcap": 1.5}, {"sinks": (0.5, -1.0, 3.0, 0.0)}])
def test_softcaps_and_sinks_are_applied(fields) -> None:
    layer = replace(a_layer(2, 2), **fields)
    store, loop = a_store(layer, an_arena(layer)), RaggedLoop(layer)
    for start, count in ((0, 7), (7, 1), (8, 3)):
        new = draw(layer, count, start)
        assert_close(extend(store, new), attend(loop, new))
        append(loop, new)


def test_fork_takes_no_pages_before_a_write() -> None:
    layer = a_layer(2, 2)
    arena = an_arena(layer)
    pages, store = arena.pages[0], a_store(layer, arena)
    extend(store, draw(layer, 10))
    free = len(pages._free)
    forks = [store.fork() for _ in range(3)]
    assert len(pages._free) == free
    assert store.shared_nbytes == store.nbytes
    before = a_store(layer, arena)
    extend(before, draw(layer, 10))
    extend(forks[0], draw(layer, 1, 10, seed=1))
    extend(store, draw(layer, 1, 10, seed=2))
    assert same(forks[1], before)
    assert not same(forks[0], store)
    assert store.shared_nbytes == 4 * pages.page_bytes  # two full pages of each head


@pytest.mark.extended
def test_shared_pages_outlive_one_owner() -> None:
    layer = a_layer(2, 2)
    arena = an_arena(layer)
    pages, store = arena.pages[0], a_store(layer, arena)
    empty = len(pages._free)
    extend(store, draw(layer, 10))
    fork, alike, free = store.fork(), a_store(layer, arena), len(pages._free)
    fork.separate()
    assert len(pages._free) == free
    extend(alike, draw(layer, 10))
    del store
    gc.collect()
    assert same(fork, alike)
    assert empty - len(pages._free) == (fork.nbytes + alike.nbytes) // pages.page_bytes
    del fork, alike
    gc.collect()
    assert len(pages._free) == empty


@pytest.mark.extended
def test_pages_are_freed_with_their_sequence() -> None:
    layer = a_layer(2, 2)
    arena = an_arena(layer)
    pages, store = arena.pages[0], a_store(layer, arena)
    free = len(pages._free)
    extend(store, draw(layer, 30))
    fork = store.fork()
    assert len(pages._free) == free - 2 * 8
    store.apply(a_plan([[0, 1], []], [30, 30]))
    assert store.nbytes == pages.page_bytes
    del store
    gc.collect()
    assert len(pages._free) == free - 2 * 8
    del fork
    gc.collect()
    assert len(pages._free) == free


def test_full_arena_is_refused_unchanged() -> None:
    layer = a_layer(2, 2)
    store = a_store(layer, an_arena(layer, num_pages=5))
    extend(store, draw(layer, 8))
    other = store.fork()
    with pytest.raises(CacheError, match=r"needs 2 more pages of 4.*but 1 of 5 are free.*larger"):
        extend(store, draw(layer, 1, 8))
    assert same(store, other)
    with pytest.raises(CacheError, match="at least one page"):
        an_arena(layer, num_pages=0)


def test_eviction_from_shared_pages_copies_kept_entries_only() -> None:
    layer = a_layer(2, 2)
    arena = an_arena(layer, num_pages=10)
    store, new = a_store(layer, arena), draw(layer, 16)
    append(store, new)  # 4 pages per head: 8 of 10
    fork = store.fork()
    fork.evict(a_plan([range(1, 16, 4), range(2, 16, 4)], fork.lengths))
    assert fork.lengths == (4, 4) and len(arena.pages[0]._free) == 0
    for head, first in enumerate((1, 2)):
        expected = new.keys[head, first::4]
        assert torch.equal(fork.entries().head_keys(head), expected)
        assert torch.equal(store.entries().head_keys(head), new.keys[head])
    with pytest.raises(CacheError, match="2 more pages"):
        store.fork().evict(a_plan([range(1, 16, 4), range(2, 16, 4)], store.lengths))


def test_truncate_removes_the_latest_tokens() -> None:
    layer = a_layer(2, 2)
    arena = an_arena(layer)
    store, expected = a_store(layer, arena), a_store(layer, arena)
    extend(store, draw(layer, 9))
    extend(expected, draw(layer, 9))
    extend(store, draw(layer, 4, 9))
    store.truncate(9)
    assert same(store, expected)
    other = draw(layer, 3, 9, seed=3)
    assert torch.equal(extend(store, other), extend(expected, other))


@pytest.mark.parametrize(("form", "plain"), [("dense", DenseLayer), ("ragged", RaggedLayer)])
def test_states_equal_those_of_the_unpaged_form(form, plain) -> None:
    layer = a_layer(2, 2)
    spec, new = a_spec(layer), draw(a_layer(2, 2), 9)
    paged = replace(spec, arena=an_arena(layer))
    caches = SequenceCache(spec, form), SequenceCache(paged, form)
    for cache in caches:
        extend(cache.layers[0], new)
        cache.advance(9)
    assert isinstance(caches[0].layers[0], plain)
    states = [cache.state() for cache in caches]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name])
    for target in (spec, paged):
        for state in states:
            for build in (SequenceCache.restore, SequenceCache.adopt):
                own = {name: tensor.clone() for name, tensor in state.items()}
                assert same(build(target, own, caches[0].meta()).layers[0], caches[0].layers[0])


def test_pages_of_forks_count_once() -> None:
    layer = a_layer(2, 2)
    cache = SequenceCache(replace(a_spec(layer), arena=an_arena(layer)), "ragged")
    extend(cache.layers[0], draw(layer, 10))
    fork = cache.fork()
    assert unique_nbytes([cache, fork]) == cache.nbytes == fork.nbytes > 0
    extend(fork.layers[0], draw(layer, 1, 10))
    assert cache.nbytes < unique_nbytes([cache, fork]) < cache.nbytes + fork.nbytes


def test_merge_equals_that_of_a_ragged_layer() -> None:
    layer = a_layer(2, 2)
    paged = a_store(layer, an_arena(layer))
    ragged = RaggedLayer(layer, layer_options())
    folds = Folds(
        torch.tensor([1, 2, 7]),
        torch.tensor([0, 0, 9]),
        torch.tensor([0.5, 0.25, 0.5]),
        torch.tensor([0.5, 0.25, 0.5]),
    )
    plan = Plan(torch.tensor([0, 4, 8, 9]), (2, 2), folds)
    for store in (paged, ragged):
        append(store, draw(layer, 6))
        store.evict(plan)
    assert same(paged, ragged)


def test_unpageable_layers_ignore_the_arena() -> None:
    layers = a_layer(2, 2), a_layer(1, 3, window=6, index=1), a_layer(3, 1, index=2)
    spec = a_spec(*layers)
    spec = replace(spec, arena=PageArena(spec, 20, 4))
    kinds = [type(store).__name__ for store in SequenceCache(spec, "ragged").layers]
    assert kinds == ["PagedLayer", "SlidingWindowLayer", "PagedLayer"]
    noted = SequenceCache(spec, "ragged", Ledger(("mass",), ())).layers
    assert [type(store).__name__ for store in noted] == kinds
    tiered = SequenceCache(spec, "tiered", parking=parking_of("tiered")).layers
    assert "PagedLayer" not in {type(store).__name__ for store in tiered}


def test_column_writes_and_entries_of_another_dtype_are_refused() -> None:
    layer = a_layer(2, 2)
    store = a_store(layer, an_arena(layer))
    extend(store, draw(layer, 4))
    plan = replace(a_plan([[0], [1]], [4, 4]), columns={"mass": torch.zeros(2)})
    with pytest.raises(CacheError, match="holds no 'mass'"):
        store.evict(plan)
    with pytest.raises(CacheError, match="dtype|bfloat16"):
        append(store, draw(layer, 1, 4, dtype=torch.bfloat16))
