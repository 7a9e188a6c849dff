"""Eviction during decoding: in place at every step, equal to a loop."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from builders import Tokens, a_plan
from cache_stores import addresses, append, assert_holds, attend, extend, same, same_bits
from larder.cache import CacheLayer, RaggedLayer
from larder.core import CacheError, Plan
from references.cache.ragged import RaggedLoop

TYPES = [torch.float32, torch.bfloat16]


def evict(store: CacheLayer, loop: RaggedLoop, chosen: list[list[int]]) -> None:
    store.evict(a_plan(chosen, store.lengths))
    loop.keep(chosen)


def step(subject: Any, store: CacheLayer, loop: RaggedLoop, new: Tokens) -> None:
    """Tokens come in, and see what the loop sees."""
    dtype = store.entries().keys.dtype
    new = subject.stored(new, dtype)
    expected = attend(loop, new)
    # What is turned to and fro is rounded on the way, by the loop in other places.
    within = 2e-5 if loop.exact or dtype is torch.float32 else 0.1
    torch.testing.assert_close(extend(store, new).double(), expected, atol=within, rtol=1e-4)
    append(loop, new)


def test_evict_equals_apply(planned) -> None:
    source = Random(0)
    for gone in (0, 1, 3, 13):
        (evicted, loop), (applied, _) = planned.filled(), planned.filled()
        chosen = planned.losing(source, evicted.lengths, gone)
        evict(evicted, loop, chosen)
        applied.apply(a_plan(chosen, applied.lengths))
        assert same(evicted, applied)
        assert_holds(evicted, loop)
        assert same_bits(evicted.state(), applied.state())


def test_eviction_is_in_place(planned) -> None:
    store, loop = planned.new(), planned.loop()
    for twin in (store, loop):
        append(twin, planned.tokens(13))
    store.compact()
    before, size = addresses(store), store.nbytes
    evict(store, loop, [[0, 2, 3, 5, 8, 9, 11, 12]] * planned.layer.kv_heads)
    assert store.replaced_bytes == 0
    step(planned, store, loop, planned.tokens(3, 13))
    step(planned, store, loop, planned.tokens(2, 16))
    assert_holds(store, loop)
    assert (addresses(store), store.nbytes, store.replaced_bytes) == (before, size, 0)


@pytest.mark.parametrize("dtype", TYPES)
def test_evicting_as_many_as_appended_equals_the_reference_in_place(planned, dtype) -> None:
    source = Random(1)
    store, loop = planned.filled(9, dtype)  # heads are uneven, and one is empty
    store.allocate(2)
    before, size, start = addresses(store), store.nbytes, 9
    held = store.lengths
    for count in [1, 2, 1, 1] * 4:
        step(planned, store, loop, planned.tokens(count, start))
        start += count
        evict(store, loop, planned.losing(source, store.lengths, count))
        assert store.lengths == held
        assert_holds(store, loop)
    if not any(planned.kind.grades):  # a coded tier is never written in place
        assert (addresses(store), store.nbytes) == (before, size)


def test_heads_move_through_their_slack_and_wrap(planned) -> None:
    source = Random(5)
    store, loop = planned.filled(13)
    store.allocate(20)
    before, size, held = addresses(store), store.nbytes, store.lengths
    begins = set()
    for position in range(13, 55):
        step(planned, store, loop, planned.tokens(1, position))
        early = planned.losing(source, [min(n, 4) for n in store.lengths], 1)
        rest = [list(range(min(n, 4), n)) for n in store.lengths]
        evict(store, loop, [own + late for own, late in zip(early, rest, strict=True)])
        assert store.lengths == held
        assert_holds(store, loop)
        begins.add(store.entries().starts)
    if isinstance(store, RaggedLayer):
        assert (addresses(store), store.nbytes) == (before, size)
        assert len(begins) > 1  # later entries stay where they are until the room is used up


@pytest.mark.parametrize("dtype", TYPES)
def test_uneven_eviction_does_not_accumulate_slack(planned, dtype) -> None:
    source, start = Random(2), 13
    store, loop = planned.filled(13, dtype)
    for turn in range(16):
        count = source.randint(1, 4)
        step(planned, store, loop, planned.tokens(count, start))
        start += count
        lengths = store.lengths
        if planned.kind.plans.value == "any":
            chosen = [sorted(source.sample(range(n), source.randint(n // 2, n))) for n in lengths]
            chosen[turn % len(chosen)] = [[], [lengths[turn % len(chosen)] - 1]][turn % 2]
        else:
            chosen = planned.losing(source, lengths, source.randint(0, lengths[0] // 2))
        evict(store, loop, chosen)
        assert_holds(store, loop)
        if turn % 5 == 3:
            store.compact()
        assert store.nbytes < 64 * 1024  # slack does not pile up


def test_truncate_after_an_eviction_equals_its_reference(planned) -> None:
    store, loop = planned.filled()
    store.reserve(6)
    evict(store, loop, planned.losing(Random(3), store.lengths, 2))
    extend(store, planned.tokens(5, 13, seed=4))
    store.truncate(13)
    assert_holds(store, loop)
    step(planned, store, loop, planned.tokens(3, 13))


def test_state_after_an_eviction_round_trips(planned) -> None:
    store, loop = planned.filled()
    evict(store, loop, planned.losing(Random(4), store.lengths, 2))
    for copy in (store.fork(), type(store).restore(store.layer, store.state())):
        assert_holds(copy, loop)
        assert same_bits(copy.state(), store.state())


BAD = {
    "descending": lambda n, k: Plan(_each([2, 1, 0], n, k), (3,) * k),
    "twice": lambda n, k: Plan(_each([1, 1], n, k), (2,) * k),
    "beyond": lambda n, k: Plan(_each([0, n], n, k), (2,) * k),
    "before": lambda n, k: Plan(_each([-1, 0], n, k), (2,) * k),
    "miscounted": lambda n, k: Plan(_each([0, 1], n, k), (1,) * k),
    "another_layer": lambda n, k: Plan(_each([0, 1], n, k + 1), (2,) * (k + 1)),
}


def _each(indices: list[int], held: int, heads: int) -> torch.Tensor:
    return torch.tensor([held * head + index for head in range(heads) for index in indices])


def test_oversized_plan_is_refused_without_changes(planned, carry_out) -> None:
    store = planned.new()
    append(store, planned.tokens(6))
    before = store.state()
    for bad in BAD.values():
        with pytest.raises(CacheError, match="kept entries"):
            carry_out(store, bad(6, planned.layer.kv_heads))
        assert same_bits(store.state(), before)
    append(store, planned.tokens(1, 6))


def test_store_without_codecs_refuses_grades_above_zero(planned, carry_out) -> None:
    if planned.kind.codecs:
        return
    store = planned.new()
    append(store, planned.tokens(3))
    plan = planned.plan([[0, 2]] * planned.layer.kv_heads, 3)
    finest = torch.zeros(len(plan.kept), dtype=torch.int8)
    before = store.state()
    with pytest.raises(CacheError, match="use a compensation"):
        carry_out(store, Plan(plan.kept, plan.lengths, grades=finest + 1))
    assert same_bits(store.state(), before)
    carry_out(store, Plan(plan.kept, plan.lengths, grades=finest))
    assert store.lengths == plan.lengths


@pytest.mark.parametrize("subject", ["window-grouped"], indirect=True)
def test_sliding_window_layer_refuses_plans(subject, carry_out) -> None:
    store, _ = subject.filled()
    before = store.state()
    with pytest.raises(CacheError, match="plan for managed layers only"):
        carry_out(store, a_plan([[0]] * subject.layer.kv_heads, store.lengths))
    assert same_bits(store.state(), before)
