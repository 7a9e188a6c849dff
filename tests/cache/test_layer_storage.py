"""Bytes, forks and states of every form of storage."""

from __future__ import annotations

import weakref

import torch

from builders import layer_options
from cache_stores import append, assert_holds, exact, extend, same, same_bits
from larder.cache import DenseLayer, TieredLayer
from larder.core import LayerSpec
from tensor_memory import reachable_tensors, storage_bytes


def test_every_byte_is_counted(subject) -> None:
    store, _ = subject.filled()
    for step in range(4):
        assert storage_bytes(reachable_tensors(store)) == store.nbytes
        extend(store, subject.tokens(3, 13 + 3 * step))
    store.reserve(50)
    assert storage_bytes(reachable_tensors(store)) == store.nbytes
    store.compact()
    assert storage_bytes(reachable_tensors(store)) == store.nbytes


def test_reachable_tensors_include_a_hidden_tensor(subject) -> None:
    store, _ = subject.filled()
    store.hidden = {"old": [torch.zeros(1000)]}
    assert storage_bytes(reachable_tensors(store)) == store.nbytes + 4000


def test_plan_frees_evicted_storage_at_once(planned) -> None:
    store, chosen = planned.new(), planned.chosen(40)
    append(store, planned.tokens(40))
    before = store.nbytes
    old = [weakref.ref(tensor) for tensor in store.tensors()[:3]]
    store.apply(planned.plan(chosen, 40))
    assert [ref() for ref in old] == [None, None, None]
    rows = sum(len(head) for head in chosen)
    rows_of_positions = len(store.tensors()[2])
    bytes_of_entries = rows * 2 * planned.layer.head_dim * 4 + 4 * rows_of_positions
    metadata = sum(t.untyped_storage().nbytes() for t in store.tensors()[3:])
    assert store.nbytes == bytes_of_entries + metadata < before
    assert storage_bytes(reachable_tensors(store)) == store.nbytes


def test_fork_is_independent(subject) -> None:
    store, _ = subject.filled()
    store.reserve(4)
    copy, untouched = store.fork(), subject.filled()[0]
    untouched.reserve(4)
    extend(copy, subject.tokens(3, 13, seed=5))
    copy.truncate(14)
    assert same(store, untouched)
    assert not same(store, copy)


def test_fork_is_copy_on_write(subject) -> None:
    store, _ = subject.filled(200)
    held, fork = store.nbytes, store.fork()
    assert fork.nbytes - fork.shared_nbytes < 200  # lengths, starts and numbers per head
    both = storage_bytes(reachable_tensors([store, fork]))
    assert both - held == fork.nbytes - fork.shared_nbytes
    assert store.nbytes == held and store.shared_nbytes == fork.shared_nbytes
    fork.truncate(150)
    extend(fork, subject.tokens(1, 150))
    extend(store, subject.tokens(1, 200))
    for each in (store, fork):
        assert storage_bytes(reachable_tensors(each)) == each.nbytes
    own = sum(each.nbytes - each.shared_nbytes for each in (store, fork))
    both = storage_bytes(reachable_tensors([store, fork]))
    assert both - own == fork.shared_nbytes == store.shared_nbytes


def test_separate_fork_shares_slow_tiers_only(subject) -> None:
    store, _ = subject.filled(40)
    fork = store.fork()
    alone = store.fork().state()
    fork.separate()
    slow = fork.shared_host_nbytes if isinstance(fork, TieredLayer) else 0
    assert fork.shared_nbytes == store.shared_nbytes == slow
    assert same_bits(fork.state(), alone)


def test_reserved_storage_is_used(planned) -> None:
    store, loop = planned.filled()
    store.reserve(30)
    pointers, size = [t.data_ptr() for t in store.tensors()[:3]], store.nbytes
    assert_holds(store, loop)
    for start in range(13, 43, 6):
        new = planned.tokens(6, start)
        extend(store, new)
        append(loop, new)
    assert_holds(store, loop)
    assert [t.data_ptr() for t in store.tensors()[:3]] == pointers
    assert store.nbytes == size


def test_compact_releases_slack(subject) -> None:
    store, _ = subject.filled()
    store.reserve(100)
    extend(store, subject.tokens(3, 13))
    before = subject.filled()[0]
    extend(before, subject.tokens(3, 13))
    store.compact()
    before.compact()
    rows = int(exact(store).sum())
    assert same(store, before)
    assert sum(t.untyped_storage().nbytes() for t in store.tensors()[:2]) == (
        rows * 2 * subject.layer.head_dim * 4
    )


def test_restored_copy_continues_identically(subject) -> None:
    store, _ = subject.filled()
    store.reserve(9)
    state = store.state()
    assert all(tensor.is_contiguous() for tensor in state.values())
    assert all(
        tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        for tensor in state.values()
    )
    copy = type(store).restore(store.layer, {name: t.clone() for name, t in state.items()})
    assert same(store, copy)
    copy.reserve(9)
    for start, size in ((13, 4), (17, 1), (18, 6)):
        new = subject.tokens(size, start)
        assert torch.equal(extend(copy, new), extend(store, new))
    for twin in (store, copy):
        twin.compact()
    assert same(store, copy)


def test_one_state_restores_twice(subject) -> None:
    store, _ = subject.filled()
    state = store.state()
    first, second = (type(store).restore(store.layer, state) for _ in range(2))
    first.truncate(7)  # makes room in place
    append(first, subject.tokens(1, 7))
    assert same(second, store)
    assert same(type(store).restore(store.layer, state), store)


def test_lengths_are_known_without_building_entries(subject, monkeypatch) -> None:
    store, _ = subject.filled()
    expected = store.entries().lengths
    monkeypatch.setattr(type(store), "entries", None)
    assert store.lengths == expected


def test_replaced_bytes_after_growth_are_the_old_storage(subject) -> None:
    store, _ = subject.filled()
    before = store.device_nbytes - subject.unreplaced_bytes(store)
    append(store, subject.tokens(80, 13))  # more than any slack
    assert store.replaced_bytes == before


def test_replaced_bytes_after_a_plan_are_the_old_storage(planned) -> None:
    store = planned.new()
    store.allocate(50)
    append(store, planned.tokens(40))
    assert store.replaced_bytes == 0
    before = store.nbytes - planned.unreplaced_bytes(store)
    store.apply(planned.plan([[0, 1]] * planned.layer.kv_heads, 40))
    assert store.replaced_bytes == before


def test_head_offsets_are_on_the_cpu() -> None:
    layer = LayerSpec(0, query_heads=3, kv_heads=3, head_dim=16, scaling=0.25)
    with torch.device("meta"):
        store = DenseLayer(layer, layer_options())
        store.reserve(777)
        held = store.step_storage()
    assert held is not None and held.starts.device.type == "cpu"
