"""Recalled and resident entries at positions without gaps, against a loop that rotates each key."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import RADIANS, Tokens, a_layer, a_plan, draw, layer_options
from cache_stores import append, assert_close, attend, extend
from larder import Policy
from larder.cache import GaplessLayer, TieredLayer
from larder.core import AppendKind, CacheError, OffloadSpec, PrefillRecall, SpellingError
from larder.recall import Flat, Votes
from references.a2ats import turned
from references.cache.loop import Entry, attend_one

LAYER, COUNT = a_layer(2, 2), 41
RESIDENT = [0, 1, 38, 39, 40]


def a_store(parking: OffloadSpec, kind: type[TieredLayer] = GaplessLayer) -> TieredLayer:
    store = kind(LAYER, layer_options(parking=parking))
    append(store, draw(LAYER, COUNT))
    store.apply(a_plan([RESIDENT] * 2, [COUNT] * 2))
    return store


def offload(tokens: int, page: int = 1) -> OffloadSpec:
    return OffloadSpec(Flat(tokens=tokens, page=page, dense=0), is_gapless=True)


def by_loop(store: TieredLayer, new: Tokens) -> torch.Tensor:
    """Every visible entry of a head moved to the consecutive positions before the first query."""
    text, outs = draw(LAYER, COUNT), torch.empty_like(new.queries)
    choice = store.fetcher.selection
    assert choice is not None
    parked = [n for n in range(COUNT) if n not in RESIDENT]
    for h in range(LAYER.query_heads):
        head = h // LAYER.group
        numbers = choice.numbers[head].flatten().tolist()
        positions = sorted([*RESIDENT, *(parked[n] for n in numbers if n >= 0)])
        first = int(new.positions[0]) - len(positions)
        entries = [
            Entry(
                index,
                torch.tensor(turned(text.keys[head, index].tolist(), first + n - index, RADIANS)),
                text.values[head, index],
            )
            for n, index in enumerate(positions)
        ]
        for q in range(new.queries.shape[1]):
            among = [Entry(0, new.keys[head, i], new.values[head, i]) for i in range(q + 1)]
            outs[h, q] = attend_one(new.queries[h, q], entries + among, LAYER.scaling)
    return outs


@pytest.mark.parametrize(("tokens", "page"), [(3, 1), (8, 4), (36, 1)])
def test_decode_step_attends_at_consecutive_positions(tokens: int, page: int) -> None:
    store, new = a_store(offload(tokens, page)), draw(LAYER, 1, COUNT, 1)
    store.expect(AppendKind.STEP)
    assert_close(extend(store, new), by_loop(store, new))


@pytest.mark.parametrize("block", [1, 5])
def test_recalling_block_attends_at_consecutive_positions(block: int) -> None:
    recall = Votes(tokens=6, dense=0, prefill=PrefillRecall.RECALLED)
    store, new = a_store(OffloadSpec(recall, is_gapless=True)), draw(LAYER, block, COUNT, 1)
    store.expect(AppendKind.TEXT)
    assert_close(extend(store, new), by_loop(store, new))


def test_full_recall_keeps_true_positions() -> None:
    new = draw(LAYER, 1, COUNT, 1)
    stores = a_store(offload(36)), a_store(replace(offload(36), is_gapless=False), TieredLayer)
    for store in stores:
        store.expect(AppendKind.STEP)
    outs = [extend(store, new) for store in stores]
    assert_close(*outs)
    few = a_store(offload(3)), a_store(replace(offload(3), is_gapless=False), TieredLayer)
    for store in few:
        store.expect(AppendKind.STEP)
    moved, unmoved = (extend(store, new) for store in few)
    assert not torch.allclose(moved, unmoved, atol=1e-3)


def test_scratch_attention_uses_true_positions() -> None:
    new = draw(LAYER, 4, COUNT, 1)
    stores = a_store(offload(3)), a_store(replace(offload(3), is_gapless=False), TieredLayer)
    assert_close(*(attend(store, new) for store in stores))


def test_gapless_layer_round_trips_and_forks() -> None:
    parking, new = replace(offload(3), host_mib=7), draw(LAYER, 1, COUNT, 1)
    assert OffloadSpec.from_text(parking.to_text()) == parking
    store = a_store(parking)
    copies = GaplessLayer.restore(LAYER, store.state()), store.fork()
    for each in (store, *copies):
        each.expect(AppendKind.STEP)
    outs = [extend(each, new) for each in (store, *copies)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_gapless_layer_records_logits() -> None:
    store, new = a_store(offload(3)), draw(LAYER, 1, COUNT, 1)
    store.expect(AppendKind.STEP)
    store.record_logits()
    out = extend(store, new)
    assert store.take_logits() is not None
    again = a_store(offload(3))
    again.expect(AppendKind.STEP)
    assert torch.equal(out, extend(again, new))


def test_unknown_rotation_is_refused() -> None:
    layer = replace(LAYER, radians=None)
    with pytest.raises(CacheError, match="leave compact\\(\\) out"):
        GaplessLayer(layer, layer_options(parking=offload(3)))


@pytest.mark.parametrize("recall", ["wave()", "magicpig()", "bounds(corrected=2)"])
def test_compact_after_recall_beyond_pages_is_refused(recall: str) -> None:
    sentence = f"blockwise() > protect(recent=8) > sinks_and_window() > park() > {recall}"
    assert Policy.parse(sentence).parking is not None
    with pytest.raises(SpellingError, match="cannot move to other positions"):
        Policy.parse(f"{sentence} > compact()")
