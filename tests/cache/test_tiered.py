"""A layer in two tiers: nothing is lost, what is recalled is attended to, and moves are counted."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import Tokens, a_layer, a_plan, draw, layer_options
from cache_stores import append, assert_close, extend, same_bits
from larder.cache import TieredLayer
from larder.cache.offload import page_fetch
from larder.core import (
    AppendKind,
    CacheError,
    LayerSpec,
    Ledger,
    OffloadSpec,
    Plan,
    RecallPart,
    SearchMode,
)
from larder.ops import StepWork, c_library
from larder.recall import Flat
from references.cache.loop import Entry, attend_one

LAYER = a_layer(2, 2)
EVERYTHING = Flat(tokens=400, page=4, dense=0)


def a_tiered(
    recall: RecallPart = EVERYTHING, layer: LayerSpec = LAYER, host_mib: int | None = None
):
    place = torch.device("cpu")
    return TieredLayer(
        layer,
        layer_options(
            device=place, ledger=Ledger(("mass",)), parking=OffloadSpec(recall, host_mib)
        ),
    )


def keeping(store: TieredLayer, source: Random, share: float = 0.5) -> Plan:
    """Any entries of each head of the fast tier, the latest always."""
    chosen = [
        sorted({*source.sample(range(n), int(n * share)), n - 1}) if n else []
        for n in store.lengths
    ]
    return a_plan(chosen, list(store.lengths))


def filled(store: TieredLayer, count: int = 40, seed: int = 0) -> list[list[Entry]]:
    """Tokens appended in three goes, parked after each; all there ever was, head by head."""
    source, ever = Random(seed), [[] for _ in range(store.layer.kv_heads)]
    for start in range(0, count, count // 3):
        new = draw(store.layer, min(count // 3, count - start), start, seed)
        append(store, new)
        for head, entries in enumerate(ever):
            for q, position in enumerate(new.positions.tolist()):
                entries.append(Entry(position, new.keys[head, q], new.values[head, q]))
        store.apply(keeping(store, source))
    return ever


def loop(new: Tokens, ever: list[list[Entry]], layer: LayerSpec = LAYER) -> torch.Tensor:
    """Attention of new tokens to all there ever was, and causally among themselves."""
    outs = []
    for h in range(layer.query_heads):
        own = ever[h // layer.group]
        rows = []
        for q in range(new.queries.shape[1]):
            head = h // layer.group
            among = [Entry(0, new.keys[head, i], new.values[head, i]) for i in range(q + 1)]
            rows.append(attend_one(new.queries[h, q], [*own, *among], layer.scaling))
        outs.append(torch.stack(rows))
    return torch.stack(outs)


@pytest.mark.parametrize("queries", [1, 5])
def test_full_recall_attends_to_all_entries(queries) -> None:
    store = a_tiered()
    ever = filled(store)
    assert all(store.parked().lengths)
    new = draw(LAYER, queries, 40, 1)
    assert_close(extend(store, new), loop(new, ever))


def test_several_tokens_attend_to_all_entries() -> None:
    store = a_tiered(Flat(tokens=1, dense=0))
    ever = filled(store)
    new = draw(LAYER, 3, 40, 1)
    assert_close(extend(store, new), loop(new, ever))


def test_decode_step_attends_to_the_fast_tier_and_the_best_pages() -> None:
    recall = Flat(tokens=8, page=4, dense=0)
    store = a_tiered(recall)
    filled(store)
    new = draw(LAYER, 1, 40, 1)
    fast, parked = _entries_by_tier(store)
    got = extend(store, new)
    for h in range(LAYER.query_heads):
        head = h // LAYER.group
        numbers = _best_pages(new, store, head, recall)
        seen = [*fast[head]]
        seen += [parked[head][n] for n in numbers]
        own = Entry(40, new.keys[head, 0], new.values[head, 0])
        assert_close(got[h, 0], attend_one(new.queries[h, 0], [*seen, own], LAYER.scaling))


def _entries_by_tier(store: TieredLayer) -> list[list[list[Entry]]]:
    """The entries of the fast and of the slow tier, head by head."""
    tiers = []
    for held in (store.entries(), store.parked()):
        heads = [
            [
                Entry(p, k.clone(), v.clone())
                for p, k, v in zip(
                    held.head_positions(h).tolist(),
                    held.head_keys(h),
                    held.head_values(h),
                    strict=True,
                )
            ]
            for h in range(LAYER.kv_heads)
        ]
        tiers.append(heads)
    return tiers


def _best_pages(new: Tokens, store: TieredLayer, head: int, recall: Flat) -> list[int]:
    """Entries of the pages that the queries of a group name in turn, by their best key."""
    keys = store.parked().head_keys(head)
    pages = [list(range(first, min(first + 4, len(keys)))) for first in range(0, len(keys), 4)]
    ranked = []
    for h in range(head * LAYER.group, (head + 1) * LAYER.group):
        scores = [max(float(keys[n] @ new.queries[h, 0]) for n in page) for page in pages]
        ranked.append(sorted(range(len(pages)), key=lambda p, s=scores: (-s[p], p)))
    chosen: list[int] = []
    for rank in range(len(pages)):
        for own in ranked:
            if own[rank] not in chosen:
                chosen.append(own[rank])
    return [n for page in chosen[: recall.pages] for n in pages[page]]


@given(st.integers(0, 10_000), st.sampled_from([1, 4]))
@settings(max_examples=12, deadline=None)
def test_recall_with_page_slots_equals_fresh_recall(seed, page) -> None:
    """Pages that stay in their slots from step to step give what freshly fetched ones would."""
    source = Random(seed)
    store, position = a_tiered(Flat(tokens=8, page=page, dense=0)), 0
    for _ in range(8):
        size = source.choice([1, 1, 1, 6])
        new = draw(LAYER, size, position, seed)
        fresh = store.fork()
        assert_close(extend(store, new), extend(fresh, new))
        position += size
        if source.random() < 0.4:
            store.evict(keeping(store, source))
    asked, moved = store.pages
    assert 0 <= moved <= asked


def test_resident_pages_are_not_loaded_again() -> None:
    store = a_tiered(Flat(tokens=8, page=4, dense=0))
    filled(store)
    new = draw(LAYER, 1, 40, 1)
    extend(store, new)
    asked, moved = store.pages
    assert asked == moved == 4  # two pages of each of two heads
    store.truncate(40)
    extend(store, new)
    assert store.pages == (8, 4)


def test_exact_search_mode_queries_the_index(monkeypatch) -> None:
    store = a_tiered(replace(EVERYTHING, search=SearchMode.EXACT))
    filled(store)

    def fail_approximate(*args: object) -> None:
        raise AssertionError("approximate search")

    def fail_exact(*args: object) -> None:
        raise AssertionError("exact search")

    index = type(store.fetcher.shared_index.index)
    monkeypatch.setattr(index, "find", fail_approximate)
    monkeypatch.setattr(index, "exact", fail_exact)
    with pytest.raises(AssertionError, match="exact search"):
        extend(store, draw(LAYER, 1, 40, 1))


def test_restored_store_attends_bit_exactly() -> None:
    store = a_tiered(Flat(tokens=8, page=4, dense=0))
    filled(store)
    state = store.state()
    twin = TieredLayer.restore(LAYER, state)
    assert same_bits(state, twin.state())
    for start in (40, 41):
        new = draw(LAYER, 1, start, 1)
        assert torch.equal(extend(store, new), extend(twin, new))


def test_bytes_are_those_of_every_tensor_of_both_tiers() -> None:
    store = a_tiered(Flat(tokens=8, page=4, dense=0))
    filled(store)
    extend(store, draw(LAYER, 1, 40, 1))
    assert store.nbytes == sum(t.untyped_storage().nbytes() for t in store.tensors())
    slow = 2 * 8 * 4 + 4 + 4  # keys and values, position, one column
    assert store.nbytes - store.device_nbytes >= sum(store.parked().lengths) * slow
    assert store.device_nbytes < store.nbytes


def test_columns_are_offloaded_with_their_entries() -> None:
    store = a_tiered()
    append(store, draw(LAYER, 6))
    held = store.entries()
    store.write_columns({"mass": torch.arange(len(held.keys), dtype=torch.float32)})
    store.apply(a_plan([[0, 5], [1, 2, 5]], [6, 6]))
    parked = store.parked()
    found = [parked.columns["mass"][parked.rows(h)].tolist() for h in range(2)]
    starts = held.starts
    expected = [[1, 2, 3, 4], [0, 3, 4]]
    assert found == [[starts[h] + n for n in expected[h]] for h in range(2)]


def test_truncate_removes_slow_tier_entries() -> None:
    store = a_tiered()
    ever = filled(store)
    extend(store, draw(LAYER, 1, 40, 1))
    store.truncate(20)
    held = [entry for heads in _entries_by_tier(store) for entries in heads for entry in entries]
    assert max(entry.position for entry in held) == 19
    left = [[entry for entry in own if entry.position < 20] for own in ever]
    new = draw(LAYER, 1, 20, 3)
    assert_close(extend(store, new), loop(new, left))


def test_plan_for_a_dense_layer_is_refused() -> None:
    store = a_tiered(Flat(tokens=4, dense=1))
    append(store, draw(LAYER, 6))
    with pytest.raises(CacheError, match="offloads nothing"):
        store.apply(a_plan([[5], [5]], [6, 6]))
    assert store.lengths == (6, 6)


def test_failed_change_offloads_nothing(monkeypatch) -> None:
    store = a_tiered()
    filled(store)
    before = store.parked().lengths

    def fail(plan: Plan) -> None:
        raise MemoryError

    monkeypatch.setattr(store._ragged, "apply", fail)
    with pytest.raises(MemoryError):
        store.apply(keeping(store, Random(1)))
    assert store.parked().lengths == before


def test_dropped_entries_are_in_no_tier() -> None:
    store = a_tiered()
    append(store, draw(LAYER, 6, 0, 1))
    plan = replace(a_plan([[0, 5], [1, 2, 5]], [6, 6]), dropped=torch.tensor([1, 3, 10]))
    store.apply(plan)
    assert (store.lengths, store.parked().lengths) == ((2, 3), (2, 2))
    assert store.parked().packed_positions().tolist() == [2, 4, 0, 3]


@pytest.mark.parametrize("wrong", [[3, 1], [1, 1], [0], [12]])
def test_dropping_kept_unsorted_or_unknown_entries_is_refused(wrong) -> None:
    store = a_tiered()
    append(store, draw(LAYER, 6, 0, 1))
    plan = replace(a_plan([[0, 5], [1, 2, 5]], [6, 6]), dropped=torch.tensor(wrong))
    with pytest.raises(CacheError, match="drop only rejected entries, sorted"):
        store.apply(plan)
    assert (store.lengths, store.parked().lengths) == ((6, 6), (0, 0))


def test_recall_below_its_exact_length_is_exact_without_an_index() -> None:
    recall = replace(EVERYTHING, tokens=4, exact=60)
    store = a_tiered(recall)
    ever = filled(store)
    new = draw(LAYER, 1, 40, seed=1)
    assert max(store.parked().lengths) <= 60
    assert_close(extend(store, new), loop(new, ever))
    assert not store.fetcher.shared_index.is_used and store.pages == (0, 0)
    copy = store.fork()
    assert not copy.fetcher.shared_index.is_used
    assert not any(name.startswith("index.") for name in copy.state())
    saved = TieredLayer.adopt(LAYER, store.state())
    later = draw(LAYER, 1, 41, seed=2)
    assert torch.equal(extend(saved, later), extend(store, later))


def test_recall_above_its_exact_length_uses_the_index() -> None:
    few, all_of_them = (replace(EVERYTHING, tokens=4, exact=exact) for exact in (5, 0))
    stores = a_tiered(few), a_tiered(all_of_them)
    for store in stores:
        filled(store)
    new = draw(LAYER, 1, 40, seed=1)
    outs = [extend(store, new) for store in stores]
    assert max(stores[0].parked().lengths) > 5
    assert torch.equal(*outs) and stores[0].pages == stores[1].pages != (0, 0)


def test_block_attends_to_all_entries_with_and_without_an_exact_length() -> None:
    stores = a_tiered(replace(EVERYTHING, exact=60)), a_tiered(EVERYTHING)
    ever = [filled(store) for store in stores][0]
    new = draw(LAYER, 3, 40, seed=1)
    outs = [extend(store, new) for store in stores]
    assert_close(outs[0], loop(new, ever))
    assert torch.equal(*outs)


def test_large_index_adds_one_entry_per_step(monkeypatch) -> None:
    monkeypatch.setattr(page_fetch, "AMORTIZED_ENTRIES", 20)
    store = a_tiered()
    ever = filled(store)
    extend(store, draw(LAYER, 1, 40, seed=1))  # builds the index
    before = store.fetcher.shared_index.indexed
    block = draw(LAYER, 6, 41, seed=2)
    append(store, block)
    store.apply(keeping(store, Random(3)))
    waiting = [length - known for length, known in zip(store.parked().lengths, before, strict=True)]
    assert min(waiting) > 2
    for new in (draw(LAYER, 1, 40, seed=1), block):
        for head, entries in enumerate(ever):
            for q, position in enumerate(new.positions.tolist()):
                entries.append(Entry(position, new.keys[head, q], new.values[head, q]))
    for step in range(1, 3):
        new = draw(LAYER, 1, 46 + step, seed=10 + step)
        assert_close(extend(store, new), loop(new, ever))
        assert store.fetcher.shared_index.indexed == tuple(known + step for known in before)
        for head, entries in enumerate(ever):
            entries.append(Entry(46 + step, new.keys[head, 0], new.values[head, 0]))
    assert store.fork().fetcher.shared_index.indexed == store.parked().lengths


def test_pending_entries_beyond_the_limit_are_indexed_at_once(monkeypatch) -> None:
    monkeypatch.setattr(page_fetch, "AMORTIZED_ENTRIES", 1)
    monkeypatch.setattr(page_fetch, "MAX_WAITING", 1)
    store = a_tiered()
    filled(store)
    extend(store, draw(LAYER, 1, 40, seed=1))
    append(store, draw(LAYER, 9, 41, seed=2))
    store.apply(keeping(store, Random(3)))
    extend(store, draw(LAYER, 1, 50, seed=3))
    assert store.fetcher.shared_index.indexed == store.parked().lengths


@pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")
def test_exact_step_attends_to_both_tiers_in_one_call() -> None:
    store = a_tiered(replace(EVERYTHING, tokens=4, exact=60))
    ever = filled(store)
    for number in range(3):
        new, lengths = draw(LAYER, 1, 40 + number, seed=1 + number), store.lengths
        storage = store.step_storage()
        assert storage is not None and len(storage.segments) == 1
        (position,) = positions = new.positions.tolist()
        work = StepWork(new.queries, new.keys, new.values, positions, [storage], LAYER.scaling)
        work.run()
        store.count_step(position)
        assert_close(work.state[0], loop(new, ever))
        assert store.lengths == tuple(length + 1 for length in lengths)
        assert store.entries().head_positions(1)[-1] == position
        for head, entries in enumerate(ever):
            entries.append(Entry(position, new.keys[head, 0], new.values[head, 0]))
    assert store.pages == (0, 0)


@pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")
def test_searching_or_recording_step_is_not_batched() -> None:
    searching = a_tiered(replace(EVERYTHING, tokens=4, exact=5))
    filled(searching)
    assert searching.step_storage() is None
    store = a_tiered(replace(EVERYTHING, tokens=4, exact=60))
    filled(store)
    store.expect(AppendKind.QUESTION)
    assert store.step_storage() is None
    store.expect(AppendKind.STEP)
    assert store.step_storage() is not None
    store.record_logits()
    assert store.step_storage() is None
