"""Contract of every form of storage, compared with a loop over lists."""

from __future__ import annotations

import pytest
import torch

from builders import Tokens
from cache_stores import append, assert_close, assert_holds, attend, extend, held, same
from larder.core import CacheError


def test_store_comparison_detects_different_entries(subject) -> None:
    left, right = subject.new(), subject.new()
    append(left, subject.tokens(4, seed=1))
    append(right, subject.tokens(4, seed=2))
    assert same(left, left)
    assert not same(left, right)
    with pytest.raises(AssertionError):
        assert_close(torch.zeros(3), torch.full((3,), 1e-3))


@pytest.mark.parametrize("sections", [(5,), (1,), (2, 3), (1, 1, 4)])
def test_attention_equals_its_reference(subject, sections) -> None:
    store, loop = subject.filled()
    lengths = [offset for section in sections for offset in range(section)]
    new = subject.tokens(len(lengths), 13)
    positions = torch.tensor([13 + offset for offset in lengths])
    new = Tokens(new.queries, new.keys, new.values, positions)
    assert_close(attend(store, new, sections), attend(loop, new, sections))


def test_empty_layer_attends_among_new_tokens(subject) -> None:
    new = subject.tokens(9)
    assert_close(attend(subject.new(), new), attend(subject.loop(), new))


def test_extending_block_by_block_equals_its_reference(subject) -> None:
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


def test_outputs_have_the_dtype_of_the_queries(subject) -> None:
    store = subject.new(torch.bfloat16)
    new = subject.tokens(6)
    low = Tokens(new.queries.bfloat16(), new.keys.bfloat16(), new.values.bfloat16(), new.positions)
    assert extend(store, low).dtype is torch.bfloat16
    assert extend(store, low.part(0, 1)).dtype is torch.bfloat16
    assert {t.dtype for t in store.tensors()[:2]} == {torch.bfloat16}


def test_plan_keeps_exactly_its_entries(planned) -> None:
    store, loop = planned.filled(17)
    assert_holds(store, loop)
    assert store.lengths == tuple(len(head) for head in loop.heads)


def test_plan_may_keep_everything_or_nothing(planned) -> None:
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


@pytest.mark.parametrize("taken_back", [1, 3, 5])
def test_truncate_removes_the_latest_tokens(subject, taken_back) -> None:
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


def test_block_is_truncated_without_a_reservation(subject) -> None:
    store, loop = subject.filled()
    extend(store, subject.tokens(20, 13, seed=4))
    store.truncate(13)
    new = subject.tokens(4, 13)
    assert_close(extend(store, new), attend(loop, new))


def test_truncate_after_a_plan_equals_its_reference(planned) -> None:
    store, loop = planned.filled(13)
    store.truncate(7)
    for (positions, _, _), entries in zip(held(store), loop.heads, strict=True):
        assert positions == [e.position for e in entries if e.position < 7]
    new = planned.tokens(3, 7)
    for head in loop.heads:
        head[:] = [entry for entry in head if entry.position < 7]
    assert_close(extend(store, new), attend(loop, new))


def test_inputs_are_not_modified(subject) -> None:
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


def test_plans_unsupported_by_a_form_are_refused_unchanged(subject) -> None:
    store = subject.new()
    append(store, subject.tokens(6))
    heads = subject.layer.kv_heads
    plans = subject.kind.plans.value
    if subject.kind.parks or plans == "any" or (heads == 1 and plans == "same"):
        return
    uneven = subject.plan([[0, 1]] + [[2, 3]] * (heads - 1), 6)
    before = store.fork()
    with pytest.raises(CacheError):
        store.apply(uneven)
    assert same(store, before)
