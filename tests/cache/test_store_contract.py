"""What every form of storage promises, held against a loop over lists."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from builders import Tokens
from larder.cache.base import Store
from larder.core.errors import CacheError
from memory import reachable_tensors, storage_bytes
from references.cache.ragged import RaggedLoop


def held(store: Store) -> list[tuple[list[int], Tensor, Tensor]]:
    """Positions, keys and values of each head."""
    entries = store.entries()
    return [
        (
            entries.head_positions(h).tolist(),
            entries.head_keys(h).clone(),
            entries.head_values(h).clone(),
        )
        for h in range(len(entries.lengths))
    ]


def same(left: Store, right: Store) -> bool:
    pairs = zip(held(left), held(right), strict=True)
    return all(
        a[0] == b[0] and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]) for a, b in pairs
    )


def attend(
    store: Store | RaggedLoop, new: Tokens, sections: tuple[int, ...] | None = None
) -> Tensor:
    parts = sections or (new.queries.shape[1],)
    return store.attend(new.queries, new.keys, new.values, new.positions, parts)


def append(store: Store | RaggedLoop, new: Tokens) -> None:
    store.append(new.keys, new.values, new.positions)


def extend(store: Store, new: Tokens) -> Tensor:
    return store.extend(new.queries, new.keys, new.values, new.positions)


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected.double(), atol=2e-5, rtol=1e-4)


def assert_holds(store: Store, loop: RaggedLoop) -> None:
    for (positions, keys, values), entries in zip(held(store), loop.heads, strict=True):
        count = len(positions)  # a window has forgotten the first of what the loop remembers
        expected = entries[len(entries) - count :]
        assert positions == [entry.position for entry in expected]
        for row, entry in enumerate(expected):
            assert torch.equal(keys[row], entry.key)
            assert torch.equal(values[row], entry.value)


def test_two_stores_with_different_entries_are_told_apart(subject) -> None:
    left, right = subject.new(), subject.new()
    append(left, subject.tokens(4, seed=1))
    append(right, subject.tokens(4, seed=2))
    assert same(left, left)
    assert not same(left, right)
    with pytest.raises(AssertionError):
        assert_close(torch.zeros(3), torch.full((3,), 1e-3))


@pytest.mark.parametrize("sections", [(5,), (1,), (2, 3), (1, 1, 4)])
def test_attention_equals_the_loop(subject, sections) -> None:
    store, loop = subject.filled()
    lengths = [offset for section in sections for offset in range(section)]
    new = subject.tokens(len(lengths), 13)
    positions = torch.tensor([13 + offset for offset in lengths])
    new = Tokens(new.queries, new.keys, new.values, positions)
    assert_close(attend(store, new, sections), attend(loop, new, sections))


def test_an_empty_store_attends_among_new_tokens(subject) -> None:
    new = subject.tokens(9)
    assert_close(attend(subject.new(), new), attend(subject.loop(), new))


def test_extending_block_by_block_equals_the_loop(subject) -> None:
    store, loop = subject.filled()
    start = 13
    for size in (5, 1, 8, 1, 1, 3):
        new = subject.tokens(size, start)
        expected = attend(loop, new)
        assert_close(extend(store, new), expected)
        append(loop, new)
        assert_holds(store, loop)
        start += size
    assert all(positions and positions[-1] == start - 1 for positions, _, _ in held(store))


def test_single_tokens_equal_a_block(subject) -> None:
    block, _ = subject.filled()
    single, _ = subject.filled()
    block.reserve(7)
    single.reserve(7)
    new = subject.tokens(7, 13)
    together = extend(block, new)
    apart = torch.cat([extend(single, new.part(i, i + 1)) for i in range(7)], dim=1)
    assert_close(apart, together)
    for store in (block, single):
        store.compact()
    assert same(block, single)


def test_results_come_in_the_type_of_the_queries(subject) -> None:
    store = subject.new(torch.bfloat16)
    new = subject.tokens(6)
    low = Tokens(new.queries.bfloat16(), new.keys.bfloat16(), new.values.bfloat16(), new.positions)
    assert extend(store, low).dtype is torch.bfloat16
    assert extend(store, low.part(0, 1)).dtype is torch.bfloat16
    assert {t.dtype for t in store.tensors() if t.is_floating_point()} == {torch.bfloat16}


def test_every_byte_is_counted(subject) -> None:
    store, _ = subject.filled()
    for step in range(4):
        assert storage_bytes(reachable_tensors(store)) == store.nbytes
        extend(store, subject.tokens(3, 13 + 3 * step))
    store.reserve(50)
    assert storage_bytes(reachable_tensors(store)) == store.nbytes
    store.compact()
    assert storage_bytes(reachable_tensors(store)) == store.nbytes


def test_a_hidden_tensor_is_found(subject) -> None:
    store, _ = subject.filled()
    store.hidden = {"old": [torch.zeros(1000)]}
    assert storage_bytes(reachable_tensors(store)) == store.nbytes + 4000


def test_a_plan_keeps_just_what_it_names(planned) -> None:
    store, loop = planned.filled(17)
    assert_holds(store, loop)
    assert store.lengths == tuple(len(head) for head in loop.heads)


def test_what_a_plan_rejects_is_freed_at_once(planned) -> None:
    store, chosen = planned.new(), planned.chosen(40)
    append(store, planned.tokens(40))
    before = store.nbytes
    old = [weakref.ref(tensor) for tensor in store.tensors()[:3]]
    store.apply(planned.plan(chosen, 40))
    gc.collect()
    assert [ref() for ref in old] == [None, None, None]
    rows = sum(len(head) for head in chosen)
    rows_of_positions = len(store.tensors()[2])
    bytes_of_entries = rows * 2 * planned.layer.head_dim * 4 + 4 * rows_of_positions
    metadata = sum(t.untyped_storage().nbytes() for t in store.tensors()[3:])
    assert store.nbytes == bytes_of_entries + metadata < before
    assert storage_bytes(reachable_tensors(store)) == store.nbytes


def test_a_plan_may_keep_everything_or_nothing(planned) -> None:
    everything, nothing = planned.new(), planned.new()
    for store in (everything, nothing):
        append(store, planned.tokens(8))
    heads = planned.layer.kv_heads
    everything.apply(planned.plan([list(range(8))] * heads, 8))
    assert everything.lengths == (8,) * heads
    nothing.apply(planned.plan([[]] * heads, 8))
    assert nothing.lengths == (0,) * heads
    new = planned.tokens(3, 8)
    assert_close(extend(nothing, new), attend(planned.loop(), new))


def test_a_fork_goes_its_own_way(subject) -> None:
    store, _ = subject.filled()
    store.reserve(4)
    copy, untouched = store.fork(), subject.filled()[0]
    untouched.reserve(4)
    pointers = {t.untyped_storage().data_ptr() for t in store.tensors()}
    assert pointers.isdisjoint(t.untyped_storage().data_ptr() for t in copy.tensors())
    extend(copy, subject.tokens(3, 13, seed=5))
    copy.truncate(14)
    assert same(store, untouched)
    assert not same(store, copy)


@pytest.mark.parametrize("taken_back", [1, 3, 5])
def test_truncating_takes_tokens_back(subject, taken_back) -> None:
    store, _ = subject.filled()
    store.reserve(8)
    kept, gone = 5 - taken_back, 13 + 5 - taken_back
    expected = store.fork()
    expected.reserve(8)
    new = subject.tokens(5, 13)
    if kept:
        extend(expected, new.part(0, kept))
    extend(store, new)
    store.truncate(gone)
    assert same(store, expected)
    other = subject.tokens(4, gone, seed=3)
    assert_close(extend(store, other), extend(expected, other))


def test_a_failed_block_can_be_taken_back_without_having_reserved(subject) -> None:
    store, loop = subject.filled()
    extend(store, subject.tokens(20, 13, seed=4))
    store.truncate(13)
    new = subject.tokens(4, 13)
    assert_close(extend(store, new), attend(loop, new))


def test_truncating_reaches_into_what_a_plan_left(planned) -> None:
    store, loop = planned.filled(13)
    store.truncate(7)
    for (positions, _, _), entries in zip(held(store), loop.heads, strict=True):
        assert positions == [e.position for e in entries if e.position < 7]
    new = planned.tokens(3, 7)
    for head in loop.heads:
        head[:] = [entry for entry in head if entry.position < 7]
    assert_close(extend(store, new), attend(loop, new))


def test_reserved_storage_is_used(planned) -> None:
    store, loop = planned.filled()
    store.reserve(30)
    places, size = [t.data_ptr() for t in store.tensors()[:3]], store.nbytes
    assert_holds(store, loop)
    for start in range(13, 43, 6):
        new = planned.tokens(6, start)
        extend(store, new)
        append(loop, new)
    assert_holds(store, loop)
    assert [t.data_ptr() for t in store.tensors()[:3]] == places
    assert store.nbytes == size


def test_compacting_gives_slack_back(subject) -> None:
    store, _ = subject.filled()
    store.reserve(100)
    extend(store, subject.tokens(3, 13))
    before = subject.filled()[0]
    extend(before, subject.tokens(3, 13))
    store.compact()
    before.compact()
    rows = sum(store.lengths)
    assert same(store, before)
    assert sum(t.untyped_storage().nbytes() for t in store.tensors()[:2]) == (
        rows * 2 * subject.layer.head_dim * 4
    )


def test_saved_and_restored_both_continue_alike(subject) -> None:
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


def test_lengths_are_those_of_the_entries(subject, monkeypatch) -> None:
    store, _ = subject.filled()
    expected = store.entries().lengths
    monkeypatch.setattr(type(store), "entries", None)
    assert store.lengths == expected


def test_what_stood_beside_the_new_storage_is_told(subject) -> None:
    store, _ = subject.filled()
    before = store.nbytes
    append(store, subject.tokens(80, 13))  # more than any slack
    assert store.replaced_bytes == before


def test_a_plan_holds_the_old_storage_beside_the_new(planned) -> None:
    store = planned.new()
    store.allocate(50)
    append(store, planned.tokens(40))
    assert store.replaced_bytes == 0
    before = store.nbytes
    store.apply(planned.plan([[0, 1]] * planned.layer.kv_heads, 40))
    assert store.replaced_bytes == before


def test_nothing_written_is_an_input(subject) -> None:
    store, _ = subject.filled()
    new = subject.tokens(5, 13)
    before = [t.clone() for t in (new.queries, new.keys, new.values, new.positions)]
    extend(store, new)
    store.truncate(14)
    after = (new.queries, new.keys, new.values, new.positions)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_head_order_does_not_matter(subject) -> None:
    layer = subject.layer
    order = list(reversed(range(layer.kv_heads)))
    rows = [head * layer.group + r for head in order for r in range(layer.group)]
    straight, turned = subject.new(), subject.new()
    for start, size in ((0, 9), (9, 4), (13, 1)):
        new = subject.tokens(size, start)
        mixed = Tokens(new.queries[rows], new.keys[order], new.values[order], new.positions)
        assert_close(extend(turned, mixed), extend(straight, new)[rows])


def test_forms_without_free_plans_say_so(subject) -> None:
    store = subject.new()
    append(store, subject.tokens(6))
    heads = subject.layer.kv_heads
    if subject.kind.plans.value == "any" or heads == 1 and subject.kind.plans.value == "same":
        return
    uneven = subject.plan([[0, 1]] + [[2, 3]] * (heads - 1), 6)
    before = store.fork()
    with pytest.raises(CacheError):
        store.apply(uneven)
    assert same(store, before)
