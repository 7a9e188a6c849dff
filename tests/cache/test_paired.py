"""Two layers that hold entries together: what they show, what they forget, what they cost."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from builders import a_layer, a_plan, draw, layer_options
from cache_stores import append, assert_close, attend, attend_held, extend, same, same_bits
from larder.cache import LOWER, UPPER, PairedLayer, link_pairs, slerp
from larder.core import LOG_COUNT, BadParameter, CacheError, Folds, LayerPairing, Ledger, Plan
from larder.ops.attention import attention
from references.cache.paired import PairedEntry, PairLoop
from references.ops import slerp as loop

LEDGER = Ledger(("mass",), ("tau",))
PAIRING = LayerPairing(0.0, 0.6, 0.05)
LAYERS = a_layer(index=0), a_layer(index=1)


def a_pair(
    pairing: LayerPairing = PAIRING, dtype: torch.dtype = torch.float32
) -> tuple[PairedLayer, PairedLayer]:
    device = torch.device("cpu")
    halves = [
        PairedLayer(
            layer, layer_options(dtype, device=device, ledger=LEDGER, pairing=pairing), side
        )
        for layer, side in zip(LAYERS, (LOWER, UPPER), strict=True)
    ]
    link_pairs(halves)
    return halves[0], halves[1]


def read(pair: tuple[PairedLayer, PairedLayer], count: int, start: int, seed: int = 0) -> None:
    for layer, half in zip(LAYERS, pair, strict=True):
        append(half, draw(layer, count, start, seed + layer.index))


def shared(
    pair: tuple[PairedLayer, PairedLayer], keep: list[list[int]], grades: list[list[int]]
) -> None:
    """Carry the same plan out in both layers."""
    for half in pair:
        plan = a_plan(keep, half.lengths)
        half.apply(replace(plan, grades=torch.tensor(sum(grades, []), dtype=torch.int8)))


@pytest.mark.extended
@given(st.integers(0, 10_000))
@settings(max_examples=12, deadline=None)
def test_random_operations_equal_the_reference(seed: int) -> None:
    rng, pair = Random(seed), a_pair(LayerPairing(0.0, 0.3, 0.2))
    reference = PairLoop(0.3, 0.2)
    length = 0
    for _ in range(4):
        for layer, half, heads in zip(LAYERS, pair, reference.layers, strict=True):
            new = draw(layer, 5, length, seed + layer.index)
            append(half, new)
            for head, held in enumerate(heads):
                for row, index in enumerate(new.positions.tolist()):
                    held[index] = PairedEntry(
                        new.keys[head, row].tolist(), new.values[head, row].tolist()
                    )
        length += 5
        for side, half in enumerate(pair):
            kept: list[dict[int, int]] = []
            for held in reference.layers[side]:
                positions = sorted(index for index in held if rng.random() < 0.8)
                kept.append(dict.fromkeys(positions, 0))
            folds = folded(reference, side, kept, rng)
            for held, grades in zip(reference.layers[side], kept, strict=True):
                for index in grades:
                    grades[index] = int(max(held[index].is_shared, rng.random() < 0.5))
            rows = [
                [sorted(held).index(index) for index in grades]
                for held, grades in zip(reference.layers[side], kept, strict=True)
            ]
            plan = a_plan(rows, half.lengths)
            grades = [grade for head in kept for grade in head.values()]
            plan = replace(plan, grades=torch.tensor(grades, dtype=torch.int8), folds=folds)
            (half.apply if rng.random() < 0.5 else half.evict)(plan)
            reference.plan(side, kept)
        for half, heads in zip(pair, reference.layers, strict=True):
            assert_holds_reference(half, heads)


def folded(reference: PairLoop, side: int, kept: list[dict[int, int]], rng: Random) -> Folds:
    """Some kept entries take another in, in the loop already."""
    rows: list[tuple[int, int]] = []
    first = 0
    for head, (held, grades) in enumerate(zip(reference.layers[side], kept, strict=True)):
        order = sorted(held)
        target = rng.choice([*grades, None])
        if target is not None:
            source = rng.choice(order)
            reference.fold(side, head, target, [(source, 0.25), (target, 0.5)])
            rows += [
                (first + order.index(p), first + order.index(target)) for p in (source, target)
            ]
        first += len(held)
    indices = torch.tensor(rows, dtype=torch.int64).view(-1, 2)
    weights = torch.tensor([0.25, 0.5] * (len(rows) // 2))
    return Folds(indices[:, 0], indices[:, 1], weights, weights)


def assert_holds_reference(half: PairedLayer, heads: list[dict[int, PairedEntry]]) -> None:
    entries = half.entries()
    for head, held in enumerate(heads):
        positions = sorted(held)
        assert entries.head_positions(head).tolist() == positions
        grades = entries.grades[entries.rows(head)].tolist() if len(entries.grades) else [0] * 99
        assert [bool(grade) for grade, _ in zip(grades, positions, strict=False)] == [
            held[index].is_shared for index in positions
        ]
        for kind, rows in (("key", entries.head_keys(head)), ("value", entries.head_values(head))):
            expected = [getattr(held[index], kind) for index in positions]
            assert_close(rows, torch.tensor(expected).view(len(positions), -1))
    queries = draw(half.layer, 3, 100)
    outs = [
        attention(group, entries.head_keys(head), entries.head_values(head), half.layer.scaling)[0]
        for head, group in enumerate(queries.queries.unflatten(0, (2, -1)))
    ]
    assert_close(attend_held(half, queries), torch.cat(outs))


def test_bytes_shrink_to_one_direction_for_two_layers() -> None:
    pair = a_pair(LayerPairing(0.0, 0.6, 0.0))
    read(pair, 100, 0)
    for half in pair:
        half.compact()
    before = sum(half.nbytes for half in pair)
    everything = [list(range(100))] * 2
    shared(pair, everything, [[1] * 100] * 2)
    for half in pair:
        half.compact()
    after = sum(half.nbytes for half in pair)
    entry = 2 * 8 * 4 + 4 * 4 + 2 + 4 + 2 + 2 * 4  # direction, lengths, head, place, held, columns
    assert after - 200 * entry < 400, "beside the entries there is only bookkeeping"
    assert before >= 2 * 200 * (2 * 8 * 4 + 4 + 4)
    assert pair[0].entries_copy_bytes == pair[1].entries_copy_bytes > 0
    assert pair[0].full_precision_lengths == (0, 0) and pair[0].lengths == (100, 100)


def test_shared_entry_is_freed_after_both_layers_evict_it() -> None:
    pair = a_pair(LayerPairing(0.0, 0.6, 0.0))
    read(pair, 6, 0)
    shared(pair, [[0, 1, 2, 3, 4, 5]] * 2, [[1] * 6] * 2)
    kept = pair[1].entries().head_keys(0)[[0, 3]].clone()
    pair[0].apply(a_plan([[1, 2], []], pair[0].lengths))
    assert pair[0].lengths == (2, 0) and pair[1].lengths == (6, 6)
    pair[1].apply(a_plan([[0, 3], []], pair[1].lengths))
    assert torch.equal(pair[1].entries().head_keys(0), kept)
    rows = [t for t in pair[1].tensors() if t.shape[:1] == (4,)]
    assert rows, "positions 0 to 3 of head 0 are held by one layer or the other"
    pair[0].apply(a_plan([[], []], pair[0].lengths))
    pair[1].apply(a_plan([[], []], pair[1].lengths))
    assert pair[0].lengths == pair[1].lengths == (0, 0)
    assert pair[1].nbytes < 400


def test_layer_without_a_pair_shares_nothing() -> None:
    half = a_pair()[0]
    alone = PairedLayer(LAYERS[0], layer_options(ledger=LEDGER, pairing=PAIRING))
    append(alone, draw(LAYERS[0], 4))
    plan = a_plan([[0, 1, 2]] * 2, alone.lengths)
    alone.apply(replace(plan, grades=torch.ones(6, dtype=torch.int8)))
    assert alone.full_precision_lengths == alone.lengths == (3, 3)
    assert half.lengths == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pair_round_trips_bit_exactly(dtype: torch.dtype) -> None:
    pair = a_pair(dtype=dtype)
    for layer, half in zip(LAYERS, pair, strict=True):
        append(half, draw(layer, 8, seed=layer.index, dtype=dtype))
        half.write_columns({"mass": half.entries().positions.float()})
    shared(pair, [[0, 1, 2, 3, 4, 5, 6, 7]] * 2, [[1] * 5 + [0] * 3] * 2)
    states = [half.state() for half in pair]
    copies = [half.restore(half.layer, state) for half, state in zip(pair, states, strict=True)]
    link_pairs(copies)
    forks = [half.fork() for half in pair]
    link_pairs(forks)
    assert sum(fork.nbytes - fork.shared_nbytes for fork in forks) < 200  # lengths and starts
    for copy, fork, half, state in zip(copies, forks, pair, states, strict=True):
        assert same(copy, half) and same(fork, half)
        assert same_bits(copy.state(), state)
    shared((forks[0], forks[1]), [[0], []], [[1], []])  # pyright: ignore
    assert all(same(copy, half) for copy, half in zip(copies, pair, strict=True))


def test_truncate_keeps_columns_with_their_entries() -> None:
    pair = a_pair(LayerPairing(0.0, 0.6, 0.0))
    read(pair, 6, 0)
    for number, half in enumerate(pair):
        rows = half.entries().positions.float() + 10 * number
        half.write_columns({"mass": rows})
    shared(pair, [[0, 1, 2, 4, 5]] * 2, [[1, 1, 0, 1, 0]] * 2)
    for number, half in enumerate(pair):
        expected = [float(index + 10 * number) for index in (0, 1, 2, 4, 5)] * 2
        assert half.entries().column("mass").tolist() == expected
        half.write_columns({"mass": half.entries().columns["mass"] + 100})
        assert half.entries().column("mass").tolist() == [n + 100 for n in expected]
    before = [half.fork() for half in pair]
    link_pairs(before)
    for half, layer in zip(pair, LAYERS, strict=True):
        extend(half, draw(layer, 2, 6, seed=5))
        half.truncate(6)
        half.compact()
    assert all(same(half, old) for half, old in zip(pair, before, strict=True))
    for half in pair:
        half.truncate(2)
        assert half.lengths == (2, 2)


def test_new_tokens_attend_to_shared_entries() -> None:
    pair = a_pair()
    read(pair, 6, 0)
    shared(pair, [[0, 1, 2, 3, 4, 5]] * 2, [[1, 1, 1, 1, 0, 0]] * 2)
    new = draw(LAYERS[0], 3, 6)
    out = attend(pair[0], new)
    entries = pair[0].entries()
    for head, group in enumerate(new.queries.unflatten(0, (2, -1))):
        keys = torch.cat([entries.head_keys(head), new.keys[head]])
        values = torch.cat([entries.head_values(head), new.values[head]])
        seen = torch.arange(9) <= torch.arange(6, 9)[:, None]
        expected = attention(group, keys, values, LAYERS[0].scaling, seen)[0]
        assert_close(out[2 * head : 2 * head + 2], expected)


def test_entry_counts_weight_attention() -> None:
    halves = [
        PairedLayer(layer, layer_options(ledger=Ledger((LOG_COUNT,)), pairing=PAIRING), side)
        for layer, side in zip(LAYERS, (LOWER, UPPER), strict=True)
    ]
    link_pairs(halves)
    pair = halves[0], halves[1]
    read(pair, 4, 0)
    shared(pair, [[0, 1, 2, 3]] * 2, [[1, 1, 0, 0]] * 2)
    pair[0].write_columns({LOG_COUNT: torch.tensor([3.0, 0, 0, 0, 0, 0, 0, 0]).log1p()})
    query, entries = draw(LAYERS[0], 1, 9), pair[0].entries()
    out = attend_held(pair[0], query)[:2]
    repeated = torch.tensor([0, 0, 0, 0, 1, 2, 3])
    keys, values = entries.head_keys(0)[repeated], entries.head_values(0)[repeated]
    assert_close(out, attention(query.queries[:2], keys, values, LAYERS[0].scaling)[0])


def test_invalid_plans_are_refused_unchanged() -> None:
    pair = a_pair()
    read(pair, 4, 0)
    shared(pair, [[0, 1, 2, 3]] * 2, [[1, 1, 0, 0]] * 2)
    before = pair[0].state()
    first, one = torch.tensor([0]), torch.ones(1)
    onto = lambda target: Folds(first, first + target, one, one)  # noqa: E731
    plan = a_plan([[0, 1], [0]], pair[0].lengths)
    for wrong, message in (
        (replace(plan, folds=onto(2)), "is a merge target, but the plan does not keep it"),
        (replace(plan, grades=torch.zeros(3, dtype=torch.int8)), "finer|come back"),
        (replace(plan, grades=torch.full((3,), 2, dtype=torch.int8)), "0 to 1"),
        (Plan(torch.tensor([0, 9]), (1, 1)), "within their own heads"),
    ):
        with pytest.raises(CacheError, match=message):
            pair[0].apply(wrong)
        assert same_bits(pair[0].state(), before)


def test_slerp_equals_its_reference() -> None:
    one, other = (torch.randn(20, 4, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    one[0], other[0] = torch.tensor([1.0, 0, 0, 0]), torch.tensor([2.0, 0, 0, 0])
    for weight in (0.0, 0.25, 0.6, 1.0):
        found = slerp(one, other, weight)
        pairs = zip(one.tolist(), other.tolist(), strict=True)
        assert_close(found, torch.tensor([loop.slerp(*pair, weight) for pair in pairs]))
        assert_close(found.norm(dim=-1), torch.ones(20))
    assert_close(slerp(one, one, 0.3), _unit(one))


def _unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


def test_pairs_start_at_a_depth_and_need_equal_heads() -> None:
    layers = [a_layer(index=i) for i in (0, 1, 3, 4, 5)]
    assert LayerPairing(0.0).pairs(layers) == [(0, 1), (3, 4)]
    assert LayerPairing(0.5).pairs(layers) == [(3, 4)]
    assert LayerPairing(1.0).pairs(layers) == []
    assert LayerPairing(0.0).pairs([a_layer(2), a_layer(4, index=1)]) == []
    with pytest.raises(BadParameter, match="minicache.weight"):
        LayerPairing(weight=1.5)
