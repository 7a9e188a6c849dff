"""Entries that become sums of entries, held against a loop over single numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch

import larder.ops.entry_merge as folding
from builders import a_plan
from cache_stores import append, assert_close, attend, exact, extend, held, same_bits
from larder.cache import CacheLayer
from larder.core import CacheError, Folds, Plan
from references.cache.folding import Fold, Place
from references.cache.ragged import RaggedLoop

CarryOut = Callable[[CacheLayer, Plan], None]


def with_folds(plan: Plan, folds: Sequence[Fold], lengths: Sequence[int]) -> Plan:
    def packed(positions: list[Place]) -> torch.Tensor:
        return torch.tensor([sum(lengths[:head]) + index for head, index in positions])

    return replace(
        plan,
        folds=Folds(
            packed([fold.source for fold in folds]),
            packed([fold.target for fold in folds]),
            torch.tensor([fold.key_weight for fold in folds]),
            torch.tensor([fold.value_weight for fold in folds]),
        ),
    )


def assert_folds(
    carry_out: CarryOut,
    store: CacheLayer,
    loop: RaggedLoop,
    chosen: list[list[int]],
    folds: Sequence[Fold],
    rounding: float = 2e-6,
) -> None:
    plan = with_folds(a_plan(chosen, store.lengths), folds, store.lengths)
    loop.fold(chosen, folds)
    carry_out(store, plan)
    for (positions, keys, values), entries in zip(held(store), loop.shown(), strict=True):
        assert positions == [entry.position for entry in entries]
        for row, entry in enumerate(entries):
            least = 1e-5 if loop.exact else 32 * rounding  # a rotation mixes large and small
            torch.testing.assert_close(keys[row], entry.key, atol=least, rtol=rounding)
            torch.testing.assert_close(values[row], entry.value, atol=1e-5, rtol=rounding)


@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 2e-6), (torch.bfloat16, 2**-7)])
def test_merge_equals_its_reference(merging, carry_out, dtype, rounding) -> None:
    source = Random(5)
    store, loop = merging.filled(13, dtype)  # heads are uneven, and one is empty
    store.allocate(4)  # slack between the heads
    start = 13
    for _ in range(4):
        new = merging.stored(merging.tokens(4, start), dtype)
        append(store, new)
        append(loop, new)
        start += 4
        chosen = merging.losing(source, store.lengths, 3)
        positions = [(head, s) for head, n in enumerate(store.lengths) for s in range(n)]
        whole = exact(store).split(list(store.lengths))
        kept = [(h, s) for h, own in enumerate(chosen) for s in own if whole[h][s]]
        weights = [(source.uniform(-1, 1), source.uniform(-1, 1)) for _ in range(12)]
        folds = [Fold(source.choice(positions), source.choice(kept[::2]), *w) for w in weights]
        assert_folds(carry_out, store, loop, chosen, folds, rounding)
    new = merging.stored(merging.tokens(3, start), dtype)
    expected = attend(loop, new)
    torch.testing.assert_close(
        extend(store, new).double(), expected, atol=10 * rounding, rtol=10 * rounding
    )


def test_merge_target_enters_its_sum_only_by_its_own_fold(merging, carry_out) -> None:
    for own in ([], [Fold((0, 2), (0, 2), 0.25, 0.5)]):
        store, loop = merging.new(), merging.loop()
        for twin in (store, loop):
            append(twin, merging.tokens(5))
        folds = [Fold((0, 1), (0, 2), 0.75, 0.5), *own, Fold((0, 4), (0, 2), -2.0, 1.0)]
        chosen = [[0, 2]] * merging.layer.kv_heads
        assert_folds(carry_out, store, loop, chosen, folds)


def test_merge_into_first_and_last_entries_equals_its_reference(merging, carry_out) -> None:
    store, loop = merging.new(), merging.loop()
    for twin in (store, loop):
        append(twin, merging.tokens(7))
    store.truncate(6)
    store.allocate(3)
    loop.keep([range(6)] * merging.layer.kv_heads)
    folds = [
        fold
        for head in range(merging.layer.kv_heads)
        for fold in (
            Fold((head, 5), (head, 0), 0.5, 0.25),
            Fold((head, 0), (head, 5), 1.0 + head, -1.0),
            Fold((head, 1), (head, 5), 1.0, 1.0),
        )
    ]
    # Targets are swapped out of what stood there before: no sum may see another's outcome.
    assert_folds(carry_out, store, loop, [[0, 5]] * merging.layer.kv_heads, folds)


def test_merge_in_chunks_equals_its_reference(merging, monkeypatch) -> None:
    monkeypatch.setattr(folding, "SOURCE_CHUNK", 2)
    monkeypatch.setattr(folding.fast, "MAX_FOLDS", 0)
    store, loop = merging.new(), merging.loop()
    for twin in (store, loop):
        append(twin, merging.tokens(9))
    folds = [Fold((0, s), (0, 3 * (s % 2)), 0.5 + s, 1.0 / (1 + s)) for s in range(9)]
    chosen = [[0, 3]] * merging.layer.kv_heads
    assert_folds(lambda one, plan: one.apply(plan), store, loop, chosen, folds)


def test_merges_outside_the_plan_are_refused(merging, carry_out) -> None:
    store = merging.new()
    append(store, merging.tokens(4))
    plan, before = merging.plan([[0, 1]] * merging.layer.kv_heads, 4), store.state()
    lengths = store.lengths
    unkept = [Fold((0, 0), (0, 3), 1.0, 1.0)]
    with pytest.raises(CacheError, match="does not keep it: keep it, or merge into a kept entry"):
        carry_out(store, with_folds(plan, unkept, lengths))
    for outside in ((0, -1), (0, 4 * merging.layer.kv_heads)):
        with pytest.raises(CacheError, match="as they are before the plan"):
            carry_out(store, with_folds(plan, [Fold(outside, (0, 1), 1.0, 1.0)], lengths))
    assert same_bits(store.state(), before)


def test_forms_without_merges_refuse_them(subject, carry_out) -> None:
    store, _ = subject.filled()
    lengths, before = store.lengths, store.state()
    plan = a_plan([range(n) for n in lengths], lengths)
    wanted = with_folds(plan, [Fold((0, 0), (0, 1), 1.0, 1.0)], lengths)
    if subject.kind.merges:
        carry_out(store, wanted)
        entries = store.entries()
        assert_close(entries.head_keys(0)[1], entries.head_keys(0)[0])
        return
    with pytest.raises(CacheError, match="use a ragged cache|managed layers"):
        carry_out(store, wanted)
    assert same_bits(store.state(), before)
