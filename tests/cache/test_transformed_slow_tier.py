"""A slow tier of transform codes: what it decodes to, in how many bytes, and what a step reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from builders import Tokens, a_layer, a_plan, draw, layer_options
from cache_stores import append, assert_close, extend, same_bits
from larder.cache import TieredLayer, TransformedSlowTier, text_tensor
from larder.core import (
    CacheError,
    Coder,
    Entries,
    Ledger,
    MeanSource,
    OffloadSpec,
    RecallPart,
    TransformSpec,
)
from larder.ops import transform_coder as coding
from larder.recall import Bounds, Dci, Flat
from references import transform as reference
from references.cache.loop import Entry, attend_one
from transforms import save_tables

LAYER, BLOCK, COUNT = a_layer(2, 2), 8, 70
EVERYTHING = Flat(tokens=400, page=4, dense=0)
CODERS = Coder.ENTROPY, Coder.PLANES, Coder.WIDTHS
SIDES = "head_keys", "head_values"


def a_spec(coder: Coder = Coder.ENTROPY, bits: float = 4.0, **options: Any) -> TransformSpec:
    save_tables(LAYER)
    return TransformSpec(coder, block=BLOCK, bits=bits, **options)


def a_store(spec: TransformSpec | None, recall: RecallPart = EVERYTHING) -> TieredLayer:
    parking = OffloadSpec(recall, None, spec)
    return TieredLayer(LAYER, layer_options(ledger=Ledger(("mass",)), parking=parking))


def fill(store: TieredLayer, count: int = COUNT, seed: int = 0) -> None:
    """Tokens in goes of any size, parked after each; the latest always stays."""
    source, start = Random(seed), 0
    while start < count:
        size = min(source.choice([1, 3, 30]), count - start)
        append(store, draw(store.layer, size, start, seed))
        own = [sorted({*source.sample(range(n), n // 3), n - 1}) for n in store.lengths]
        store.apply(a_plan(own, list(store.lengths)))
        start += size


def twins(spec: TransformSpec, recall: RecallPart = EVERYTHING) -> tuple[TieredLayer, TieredLayer]:
    """A coded store, and an exact one with the same history."""
    stores = a_store(spec, recall), a_store(None, recall)
    for store in stores:
        fill(store)
    return stores


def slow_tier(store: TieredLayer) -> TransformedSlowTier:
    assert isinstance(store._slow, TransformedSlowTier)
    return store._slow


def decoded_by_loop(store: TieredLayer, exact: TieredLayer, head: int) -> list[list[float]]:
    """Components of the coded entries of a head, each rounded around the mean of the first blocks.

    What came with the first whole block decides the means, so they are read from the store.
    """
    numbers, true = slow_tier(store)._transformed, exact.parked()
    full, tables = int(numbers.coded[head]), numbers.tables
    means = numbers.means.of_head(head)
    around = means.tolist() if isinstance(means, Tensor) else [0.0] * (2 * LAYER.head_dim)
    found = list[list[float]]()
    for entry in range(full):
        position = int(true.head_positions(head)[entry])
        row = list[float]()
        for side, name in enumerate(SIDES):
            vector = getattr(true, name)(head)[entry].tolist()
            radians = tables.radians if side == 0 else ()
            for index in range(LAYER.head_dim):
                own = (
                    vector,
                    tables.mean[side, head].tolist(),
                    tables.forward[side, head].tolist(),
                )
                number = reference.component(*own, radians, position, index)
                mean = around[side * LAYER.head_dim + index]
                row.append(reference.rounded(number, numbers.step, 0, mean))
        found.append(row)
    return found


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("mean", MeanSource)
def test_whole_blocks_are_rounded_components_and_the_rest_is_exact(coder, mean) -> None:
    store, exact = twins(a_spec(coder, mean=mean))
    got, true, numbers = store.parked(), exact.parked(), slow_tier(store)._transformed
    assert got.lengths == true.lengths and min(numbers.coded.tolist()) > 2 * BLOCK
    for head, full in enumerate(numbers.coded.tolist()):
        assert torch.equal(got.head_positions(head), true.head_positions(head))
        expected = torch.tensor(decoded_by_loop(store, exact, head))
        sides = got.head_keys(head)[:full], got.head_values(head)[:full]
        shown = numbers.tables.components(head, *sides, got.head_positions(head)[:full].long())
        near = (shown - expected).abs() < 1e-3 * numbers.step
        assert float(near.float().mean()) > 0.999  # a number in the middle may go either way
        for name in SIDES:
            assert torch.equal(getattr(got, name)(head)[full:], getattr(true, name)(head)[full:])
            assert not torch.equal(
                getattr(got, name)(head)[:full], getattr(true, name)(head)[:full]
            )


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("recall", [EVERYTHING, Bounds(tokens=400, page=4, dense=0)])
def test_attention_uses_decoded_values(queries, recall) -> None:
    store, _ = twins(a_spec(), recall)
    new, held = draw(LAYER, queries, COUNT, 1), resident(store)
    for head, own in enumerate(parked(store)):
        held[head] += own
    got = extend(store, new)
    assert_close(got, by_loop(held, new, queries))


@pytest.mark.parametrize(
    "recall", [Dci(tokens=16, page=4, dense=0), Bounds(tokens=8, page=4, dense=0)]
)
def test_step_attends_to_the_decoded_entries_of_the_chosen_pages(recall) -> None:
    store, _ = twins(a_spec(), recall)
    for turn in range(3):
        new, held, all_parked = draw(LAYER, 1, COUNT + turn, 1), resident(store), parked(store)
        got = extend(store, new)
        selection = store.fetcher.selection
        assert selection is not None
        sets = len(selection.numbers) // LAYER.kv_heads
        asked = LAYER.query_heads // len(selection.numbers)
        for number, pages in enumerate(selection.numbers):
            chosen = sorted({n for n in pages.flatten().tolist() if n >= 0})
            assert 0 < len(chosen) < len(all_parked[number // sets])
            own = held[number // sets] + [all_parked[number // sets][n] for n in chosen]
            for head in range(number * asked, (number + 1) * asked):
                kv = head // LAYER.group
                own_token = Entry(0, new.keys[kv, 0], new.values[kv, 0])
                expected = attend_one(new.queries[head, 0], [*own, own_token], LAYER.scaling)
                assert_close(got[head, 0], expected)


def test_search_finds_what_it_finds_among_decoded_keys() -> None:
    for seed in range(3):
        recall = Dci(tokens=16, page=4, dense=0, beam=2, seed=seed)
        store, _ = twins(a_spec(), recall)
        store._update_index()
        index, coded = store.fetcher.shared_index.index, store.parked()
        fields = {"keys": coded.keys, "values": coded.values, "positions": coded.positions}
        exact = Entries(**fields, starts=coded.starts, lengths=coded.lengths)
        for queries in draw(LAYER, 8, 0, seed).queries.unbind(1):
            got, expected = (index.find(queries, each, 4).pages for each in (store.parked(), exact))
            assert torch.equal(got, expected)


def test_step_decodes_the_blocks_of_recalled_entries_alone(monkeypatch) -> None:
    store, _ = twins(a_spec(), Bounds(tokens=4, page=4, dense=0))
    extend(store, draw(LAYER, 1, COUNT, 1))
    seen = list[int]()
    decode = coding.decoded_rows

    def counted(payload: Any, *layout_and_rest: Any) -> Any:
        *_, count, places, deviations, step, coder, read = layout_and_rest
        seen.append(len(np.unique(places // count)))
        return decode(payload, *layout_and_rest)

    monkeypatch.setattr(coding, "decoded_rows", counted)
    for turn in range(1, 5):
        extend(store, draw(LAYER, 1, COUNT + turn, 1))
    pages = 4 * LAYER.kv_heads
    assert 0 < sum(seen) <= 2 * pages  # a page of 4 lies in at most two blocks of 8


def test_restored_store_and_fork_continue_identically() -> None:
    store, _ = twins(a_spec(), Flat(tokens=8, page=4, dense=0))
    store.compact()
    state = store.state()
    twin, fork = TieredLayer.restore(LAYER, state), store.fork()
    assert same_bits(state, twin.state()) and same_bits(state, fork.state())
    for start in range(COUNT, COUNT + 2 * BLOCK):
        new = draw(LAYER, 1, start, 1)
        outs = [extend(each, new) for each in (twin, fork)]
        assert torch.equal(*outs)
        for each in (twin, fork):
            size = list(each.lengths)
            each.evict(a_plan([list(range(1, n)) for n in size], size))
    assert same_bits(twin.state(), fork.state())
    assert same_bits(store.state(), state)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("coded.tables", lambda held: text_tensor("another"), "another calibration"),
        ("coded.payload", lambda held: held[:-1].clone(), "damaged"),
        ("coded.owners", lambda held: held[:-1].clone(), "damaged"),
        ("coded.sizes", lambda held: -held, "damaged"),
    ],
)
def test_state_that_does_not_fit_is_refused(name, change, message) -> None:
    store, _ = twins(a_spec())
    state = store.state()
    state[f"slow.{name}"] = change(state[f"slow.{name}"])
    with pytest.raises(CacheError, match=message):
        TieredLayer.restore(LAYER, state)


@pytest.mark.parametrize("coder", CODERS)
def test_codes_take_the_bits_of_the_spec(coder) -> None:
    from larder.cache import calibrated_step
    from larder.ops import classes_of, mean_bits

    layer = replace(LAYER, head_dim=64)
    deviations = save_tables(layer).deviation.double().flatten().numpy()
    for bits in (2.0, 4.0):
        step = calibrated_step(TransformSpec(coder, bits=bits))
        mean = mean_bits(coder)[classes_of(deviations, step)].mean()
        finer = mean_bits(coder)[classes_of(deviations, step * 0.99)].mean()
        assert mean <= bits and finer >= mean - 0.1
        assert mean > bits - (1.0 if coder is Coder.WIDTHS else 0.1)


def test_bytes_are_those_of_all_tensors_and_fall_with_the_bits() -> None:
    layer = replace(LAYER, head_dim=64)
    save_tables(layer)
    held = list[float]()
    for bits in (None, 6.0, 3.0):
        spec = None if bits is None else TransformSpec(bits=bits, block=32)
        parking = OffloadSpec(EVERYTHING, None, spec)
        store = TieredLayer(layer, layer_options(parking=parking))
        append(store, draw(layer, 1025))
        store.apply(a_plan([[1024]] * 2, [1025] * 2))
        store.compact()
        assert store.nbytes == sum(t.untyped_storage().nbytes() for t in store.tensors())
        held.append(store._slow.nbytes / 2048)
    assert held[2] < held[1] - 30 < held[0] - 200


@pytest.mark.parametrize(("start", "stop"), [(40, None), (20, 30), (0, None)])
def test_removal_leaves_the_codes_of_blocks_before_it(start, stop) -> None:
    store, _ = twins(a_spec())
    before, numbers = store.parked(), slow_tier(store)._transformed
    store.truncate(start) if stop is None else store.drop_range(start, stop)
    after = store.parked()
    for head in range(LAYER.kv_heads):
        positions = before.head_positions(head)
        stays = (positions < start) | (positions >= (stop or 10**9))
        assert torch.equal(after.head_positions(head), positions[stays])
        first = int(stays.long().cumprod(0).sum())
        whole = min(first, int(numbers.coded[head])) // BLOCK * BLOCK
        for name in SIDES:
            left, right = getattr(after, name)(head), getattr(before, name)(head)[stays]
            assert torch.equal(left[:whole], right[:whole])
            assert bool(((left - right).abs() < 4 * numbers.step).all())


def test_failed_coding_changes_nothing(monkeypatch) -> None:
    store, _ = twins(a_spec())
    before = store.state()
    append(store, draw(LAYER, 9, COUNT))
    kept = [[n - 1] for n in store.lengths]

    def fail(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(store._ragged, "apply", fail)
        with pytest.raises(MemoryError):
            store.apply(a_plan(kept, list(store.lengths)))
    store.entries().keys.mul_(torch.nan)
    with pytest.raises(CacheError, match="must be finite"):
        store.apply(a_plan(kept, list(store.lengths)))
    store.truncate(COUNT)
    after = store.state()
    assert all(torch.equal(after[n], t) for n, t in before.items() if n.startswith("slow."))


def resident(store: TieredLayer) -> list[list[Entry]]:
    return entries_of(store.entries())


def parked(store: TieredLayer) -> list[list[Entry]]:
    return entries_of(store.parked())


def entries_of(held: Entries) -> list[list[Entry]]:
    """Entries head by head."""
    heads = list[list[Entry]]()
    for head in range(LAYER.kv_heads):
        rows = held.head_positions(head), held.head_keys(head), held.head_values(head)
        heads.append([Entry(int(p), k.clone(), v.clone()) for p, k, v in zip(*rows, strict=True)])
    return heads


def by_loop(held: Sequence[list[Entry]], new: Tokens, queries: int) -> Tensor:
    """Attention of new tokens to given entries, and causally among themselves."""
    rows = list[Tensor]()
    for head in range(LAYER.query_heads):
        kv = head // LAYER.group
        for q in range(queries):
            among = [Entry(0, new.keys[kv, i], new.values[kv, i]) for i in range(q + 1)]
            rows.append(attend_one(new.queries[head, q], held[kv] + among, LAYER.scaling))
    return torch.stack(rows).unflatten(0, (LAYER.query_heads, queries))
