"""Ledger columns in pages of an arena: held, forked and freed with their entries."""

from __future__ import annotations

import gc
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from builders import a_layer, a_plan, a_spec, draw, layer_options
from cache_stores import append, assert_close, attend, extend, same, same_bits
from larder.cache import (
    CacheLayer,
    PageArena,
    PagedLayer,
    RaggedLayer,
    SequenceCache,
    unique_nbytes,
)
from larder.core import LOG_COUNT, CacheError, LayerSpec, Ledger, ModelSpec, Plan
from larder.ops import AttentionBackend
from memory_counts import assert_counted

BACKENDS = (AttentionBackend.REFERENCE, AttentionBackend.CPU, AttentionBackend.GATHERED)
LEDGER = Ledger((LOG_COUNT, "mass"), ("tau",))


def paged_spec(
    layer: LayerSpec, num_pages: int = 90, backend: AttentionBackend = AttentionBackend.CPU
) -> ModelSpec:
    spec = a_spec(layer)
    return replace(spec, arena=PageArena(spec, num_pages, page_tokens=4, backend=backend))


def arena_of(spec: ModelSpec) -> PageArena:
    assert isinstance(spec.arena, PageArena)
    return spec.arena


def a_store(spec: ModelSpec, ledger: Ledger = LEDGER) -> PagedLayer:
    [store] = SequenceCache(spec, "ragged", ledger).layers
    assert isinstance(store, PagedLayer)
    return store


def a_ragged(layer: LayerSpec) -> RaggedLayer:
    return RaggedLayer(layer, layer_options(ledger=LEDGER))


def write(store: CacheLayer, packed: dict[str, Tensor]) -> None:
    entries = store.entries()
    store.write_columns({name: entries.unpack(own) for name, own in packed.items()})


def some_numbers(count: int, seed: int) -> dict[str, Tensor]:
    drawn = torch.rand(2, count, generator=torch.Generator().manual_seed(seed))
    return dict(zip(LEDGER.columns, drawn, strict=True))


def assert_alike(paged: CacheLayer, ragged: CacheLayer) -> None:
    """The same entries, columns and scalars, to the bit."""
    assert same_bits(paged.state(), ragged.state())
    assert_counted(paged)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_equal_a_ragged_layer(backend, seed) -> None:
    """Tokens, columns, evictions that write numbers, forks and cuts in any order."""
    source, layer, start = Random(seed), a_layer(2, 2), 0
    spec = paged_spec(layer, backend=backend)
    pair: list[CacheLayer] = [a_store(spec), a_ragged(layer)]
    forks: list[list[CacheLayer]] = []
    for turn in range(16):
        count = source.choice([1, 1, 1, 3, 9])
        new = draw(layer, count, start, seed)
        assert_close(attend(pair[0], new), attend(pair[1], new))
        for store in pair:
            extend(store, new)
        start += count
        held = sum(pair[0].lengths)
        for store in pair:
            write(store, some_numbers(held, seed + turn))
        if turn % 3 == 2:
            plan = random_plan(source, pair[0].lengths, seed + turn)
            is_applied = source.random() < 0.5
            for store in pair:
                (store.apply if is_applied else store.evict)(plan)
        if turn % 5 == 4:
            forks.append(pair)
            pair = [store.fork() for store in pair]
        for each in (pair, *forks):
            assert_alike(*each)


def random_plan(source: Random, lengths: tuple[int, ...], seed: int) -> Plan:
    chosen = [
        sorted(source.sample(range(held), held * source.choice([0, 1, 2, 3]) // 4))
        for held in lengths
    ]
    plan = a_plan(chosen, lengths)
    numbers = some_numbers(len(plan.kept), seed + 70)
    return replace(
        plan, columns={"mass": numbers["mass"]}, scalars={"tau": torch.tensor([0.5, seed])}
    )


def test_new_entries_in_used_pages_begin_at_zero() -> None:
    layer = a_layer(2, 2)
    spec = paged_spec(layer, num_pages=6)
    store = a_store(spec)
    extend(store, draw(layer, 11))
    write(store, some_numbers(22, 1))
    del store
    gc.collect()
    other = a_store(spec)
    for start, count in ((0, 9), (9, 1), (10, 1)):
        append(other, draw(layer, count, start))
        assert not other.entries().packed_columns().any()


def test_columns_of_a_fork_are_copied_when_one_of_both_writes() -> None:
    layer = a_layer(2, 2)
    spec = paged_spec(layer)
    store, pages = a_store(spec), arena_of(spec).pages[0]
    extend(store, draw(layer, 8))
    numbers = some_numbers(16, 2)
    write(store, numbers)
    free = len(pages._free)
    fork = store.fork()
    assert len(pages._free) == free and store.shared_nbytes == 4 * store.page_lease.page_bytes
    write(fork, {"mass": torch.zeros(16)})
    assert len(pages._free) == free - 4 and store.shared_nbytes == 0
    assert torch.equal(store.entries().column("mass"), numbers["mass"])
    assert not fork.entries().column("mass").any()
    assert torch.equal(fork.entries().column(LOG_COUNT), numbers[LOG_COUNT])
    fork.evict(replace(a_plan([[0], [1]], fork.lengths), scalars={"tau": torch.ones(2)}))
    assert store.entries().scalars["tau"].isnan().all()
    del fork
    gc.collect()
    assert len(pages._free) == free


def test_scalars_of_a_head_without_entries_are_kept() -> None:
    """Those of a fork are its own, in a page that the other one holds no more."""
    layer = a_layer(2, 2)
    store = a_store(paged_spec(layer))
    extend(store, draw(layer, 8))
    everything = a_plan([range(8), range(8)], store.lengths)
    store.evict(replace(everything, scalars={"tau": torch.tensor([1.0, 2.0])}))
    fork, kept = store.fork(), a_plan([[], [1]], store.lengths)
    fork.evict(replace(kept, scalars={"tau": torch.tensor([3.0, 4.0])}))
    assert store.entries().scalars["tau"].tolist() == [1.0, 2.0]
    assert fork.entries().scalars["tau"].tolist() == [3.0, 4.0]
    restored = a_store(paged_spec(layer)).restored(fork.state())
    assert restored.entries().scalars["tau"].tolist() == [3.0, 4.0]
    assert_alike(restored, fork)


def test_column_that_cannot_be_copied_is_refused_unchanged() -> None:
    layer = a_layer(2, 2)
    store = a_store(paged_spec(layer, num_pages=5))
    extend(store, draw(layer, 8))
    write(store, {"mass": torch.ones(16)})
    fork = store.fork()
    with pytest.raises(CacheError, match="needs 4 more pages of 4 entries, but 1 of 5 are free"):
        write(fork, {"mass": torch.zeros(16)})
    for own in (store, fork):
        assert own.entries().column("mass").all()


def test_unknown_and_misshapen_columns_are_refused() -> None:
    layer = a_layer(2, 2)
    store, other = (a_store(paged_spec(layer)) for _ in range(2))
    for own in (store, other):
        extend(own, draw(layer, 4))
    plan = a_plan([[0], [1]], store.lengths)
    for columns, scalars in (
        ({"shot": torch.zeros(2)}, {}),
        ({"mass": torch.zeros(3)}, {}),
        ({}, {"tau": torch.zeros(3)}),
        ({}, {"rho": torch.zeros(2)}),
    ):
        with pytest.raises(CacheError, match="holds no|has shape"):
            store.evict(replace(plan, columns=columns, scalars=scalars))
    with pytest.raises(CacheError, match="holds no 'shot'"):
        store.write_columns({"shot": torch.zeros(8)})
    assert same(store, other)


def test_bytes_of_columns_are_those_of_the_sequence() -> None:
    """A sequence without columns counts none, though its pages have them."""
    layer = a_layer(2, 2)
    spec = paged_spec(layer)
    plain = a_store(spec, Ledger())
    extend(plain, draw(layer, 5))
    before, whole = plain.nbytes, arena_of(spec).nbytes
    cache = SequenceCache(spec, "ragged", LEDGER)
    extend(cache.layers[0], draw(layer, 5))
    assert cache.nbytes == before + 4 * 4 * (2 * 4 + 1)  # 4 pages of 4 entries, and tau
    assert plain.nbytes == before
    assert arena_of(spec).nbytes == whole + 91 * 4 * (2 * 4 + 1)
    fork = cache.fork()
    assert unique_nbytes([cache, fork]) == cache.nbytes
    assert cache.idle_nbytes >= sum(own.nbytes for own in cache.state().values())


def test_states_restore_with_and_without_pages() -> None:
    layer = a_layer(2, 2)
    specs = a_spec(layer), paged_spec(layer)
    caches = [SequenceCache(spec, "ragged", LEDGER) for spec in specs]
    for cache in caches:
        extend(cache.layers[0], draw(layer, 9))
        write(cache.layers[0], some_numbers(18, 3))
        cache.evict(0, random_plan(Random(3), cache.layers[0].lengths, 3))
        cache.advance(9)
    states = [cache.state() for cache in caches]
    assert same_bits(*states)
    for target in specs:
        for build in (SequenceCache.restore, SequenceCache.adopt):
            own = {name: tensor.clone() for name, tensor in states[0].items()}
            assert same_bits(build(target, own, caches[0].meta()).state(), states[0])


@pytest.mark.parametrize("ledger", [Ledger(), Ledger(("mass",)), LEDGER], ids=str)
@pytest.mark.parametrize("kept", [[[], []], [[], [1, 2]]], ids=["empty", "one head"])
def test_heads_without_entries_are_restored(ledger, kept) -> None:
    layer = a_layer(2, 2)
    spec = paged_spec(layer)
    store = a_store(spec, ledger)
    extend(store, draw(layer, 6))
    store.evict(a_plan(kept, store.lengths))
    restored = a_store(spec, ledger).restored(store.state())
    assert same_bits(restored.state(), store.state())
    assert_counted(restored)
    for own in (store, restored):
        extend(own, draw(layer, 1, 6))
    assert same_bits(restored.state(), store.state())


@pytest.mark.parametrize("form", ["dense", "ragged"])
def test_empty_caches_are_restored(form) -> None:
    spec = paged_spec(a_layer(2, 2))
    cache = SequenceCache(spec, form)
    restored = SequenceCache.restore(spec, cache.state(), cache.meta())
    assert restored.lengths() == cache.lengths()
    extend(restored.layers[0], draw(a_layer(2, 2), 3))
    assert restored.lengths() == ((3, 3),)


def test_arena_grows_with_its_columns() -> None:
    layer = a_layer(2, 2)
    spec = a_spec(layer)
    arena = PageArena(spec, 3, 4, AttentionBackend.CPU, max_pages=40)
    store, ragged = a_store(replace(spec, arena=arena)), a_ragged(layer)
    for start in range(0, 27, 3):
        for own in (store, ragged):
            extend(own, draw(layer, 3, start))
            write(own, some_numbers(2 * (start + 3), start))
    assert_alike(store, ragged)
    assert arena.columns.shape == (2, 1, arena.pages[0].num_pages, 4)
