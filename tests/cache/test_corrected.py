"""Corrected layers: entries recalled for a token are added to earlier outputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from builders import a_layer, draw, layer_options
from cache_stores import append, assert_close, extend, new_tokens, same_bits
from larder.cache import CorrectedLayer
from larder.core import AppendKind, BadParameter, CacheError, Codec, OffloadSpec, Plan, RecallPart
from larder.recall import Bounds, Flat, SparQ

LAYER = a_layer(2, 2)
READ, NEAR, STEPS = 40, 4, 5
PARTS = {
    "flat": Flat(tokens=8, page=4, dense=0, corrected=2),
    "bounds": Bounds(tokens=8, page=2, dense=0, corrected=2),  # a set per query head
    "all": Flat(tokens=40, page=4, dense=0, corrected=1),
}


class Loop:
    """Sums of weights and of weighted values, one entry after the other."""

    def __init__(self) -> None:
        self.sums: dict[int, float] = {}
        self.values: dict[int, Tensor] = {}
        self.seen: dict[int, set[int]] = {}

    def attend(self, head: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        weight = math.exp(float(query @ key) * LAYER.scaling)
        self.sums[head] = self.sums.get(head, 0.0) + weight
        self.values[head] = self.values.get(head, 0.0) + weight * value

    def out(self) -> Tensor:
        return torch.stack([self.values[h] / self.sums[h] for h in range(LAYER.query_heads)])


def a_store(
    recall: RecallPart, codec: Codec | None = None
) -> tuple[CorrectedLayer, Tensor, Tensor]:
    parking = OffloadSpec(recall, None, codec)
    store = CorrectedLayer(LAYER, layer_options(parking=parking))
    new = draw(LAYER, READ, 0)
    append(store, new)
    latest = torch.arange(READ - NEAR, READ)
    store.apply(Plan(torch.cat([latest, latest + READ]), (NEAR, NEAR)))
    keys, values, held = new.keys.clone(), new.values.clone(), store.parked()
    for head in range(LAYER.kv_heads):  # numbers are positions, and codes stand for others
        keys[head, : READ - NEAR] = held.head_keys(head)
        values[head, : READ - NEAR] = held.head_values(head)
    return store, keys, values


def fetched(store: CorrectedLayer, head: int) -> list[int]:
    """Numbers of the entries that a query head was given; here they are positions, too."""
    choice = store.fetcher.selection
    own = choice.numbers[head * len(choice.numbers) // LAYER.query_heads]
    return [n for n in own.flatten().tolist() if n >= 0]


@pytest.mark.parametrize(
    "name, codec", [*((name, None) for name in PARTS), ("flat", Codec(4, 4, 8))]
)
def test_corrected_outputs_equal_their_reference(name, codec) -> None:
    store, keys, values = a_store(PARTS[name], codec)
    former: list[Loop] = []
    for step in range(STEPS):
        count, position = len(former), READ + step
        drawn = draw(LAYER, count + 1, position - count, 7 + step)
        old, new = drawn.part(0, count), drawn.part(count, count + 1)
        if count:
            out = store.attend_replayed(new_tokens(old), lambda new=new: extend(store, new))
        else:
            out = extend(store, new)
        keys = torch.cat([keys[:, : position - count], drawn.keys], 1)
        values = torch.cat([values[:, : position - count], drawn.values], 1)
        latest = Loop()
        for head in range(LAYER.query_heads):
            kv, near = head // LAYER.group, range(READ - NEAR, position + 1)
            for n in (*fetched(store, head), *near):
                latest.attend(head, new.queries[head, 0], keys[kv, n], values[kv, n])
            latest.seen[head] = {*fetched(store, head)}
            for i, loop in enumerate(former):
                for n in {*fetched(store, head)} - loop.seen[head]:
                    loop.attend(head, old.queries[head, i], keys[kv, n], values[kv, n])
                    loop.seen[head].add(n)
        former.append(latest)
        assert_close(out, torch.stack([loop.out() for loop in former], 1))
        former = former[-store.parking.recall.corrected :]
        store.record_ids((step,))
        assert len(store.ids) == len(former)
    assert (len(former[0].seen[0]) > len(fetched(store, 0))) == (name != "all")
    held = store.entries()
    for head in range(LAYER.kv_heads):  # and what was read once more stands there again
        assert torch.equal(held.head_keys(head), keys[head, READ - NEAR :])


def test_corrected_layer_round_trips_with_its_queries() -> None:
    store, _, _ = a_store(PARTS["flat"])
    extend(store, draw(LAYER, 1, READ))
    store.record_ids((5,))
    back = CorrectedLayer.restore(LAYER, store.state())
    assert same_bits(back.state(), store.state()) and back.ids == (5,)
    fork = store.fork()
    drawn = draw(LAYER, 2, READ, 3)
    old, new = drawn.part(0, 1), drawn.part(1, 2)
    before, apart = store.state(), CorrectedLayer.restore(LAYER, store.state())
    assert fork.nbytes - fork.shared_nbytes < 300  # lengths, starts and what the index votes by
    # This writes over its latest entries.
    fork.attend_replayed(new_tokens(old), lambda: extend(fork, new))
    assert same_bits(store.state(), before)
    fork = apart.fork()
    outs = [
        each.attend_replayed(new_tokens(old), lambda e=each: extend(e, new))
        for each in (store, back, fork)
    ]
    assert_close(outs[1], outs[0])
    assert_close(outs[2], outs[0])
    fork.truncate(READ + 1)
    assert fork.ids == ()
    assert store.nbytes == sum(t.untyped_storage().nbytes() for t in store.tensors())


@pytest.mark.parametrize("count", [1, 3])
def test_no_correction_after_a_text(count) -> None:
    """Its queries attended to everything, even if the text is one token."""
    store, _, _ = a_store(PARTS["flat"])
    extend(store, draw(LAYER, 1, READ))
    store.expect(AppendKind.TEXT)
    extend(store, draw(LAYER, count, READ + 1))
    store.record_ids((5,) * count)
    assert store.ids == ()


def test_only_the_latest_corrected_tokens_are_held() -> None:
    store, _, _ = a_store(PARTS["flat"])
    for step in range(3):
        extend(store, draw(LAYER, 1, READ + step))
        store.record_ids((step,))
    assert store.ids == (1, 2)


def test_invalid_corrections_are_refused() -> None:
    store, _, _ = a_store(PARTS["flat"])
    extend(store, draw(LAYER, 1, READ))
    other = draw(LAYER, 1, READ - 1)
    with pytest.raises(CacheError, match="outputs at positions \\[39\\], which are not its latest"):
        store.attend_replayed(new_tokens(other), lambda: pytest.fail("answered"))
    with pytest.raises(
        BadParameter, match="sparq.corrected must be 0, got 1: an estimate that sparq"
    ):
        SparQ(corrected=1)
    with pytest.raises(BadParameter, match="flat.corrected must be at least 0, got -1"):
        Flat(corrected=-1)
