"""A slow tier in few bits: numbers within their grids, and everything else as in an exact one."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from builders import a_layer, a_plan, draw, layer_options
from cache_stores import append, assert_close, extend, same_bits
from larder.cache import QuantizedSlowTier, TieredLayer
from larder.core import CacheError, Codec, Entries, Ledger, OffloadSpec, RecallPart
from larder.recall import Bounds, Flat
from references.cache.loop import Entry, attend_one

LAYER, GROUP = a_layer(2, 2), 8
EVERYTHING = Flat(tokens=400, page=4, dense=0)
CODECS = {"int8": Codec(8, 8, GROUP), "int4": Codec(4, 4, GROUP), "apart": Codec(4, 4, GROUP, 0.05)}


def a_store(codec: Codec = CODECS["int8"], recall: RecallPart = EVERYTHING) -> TieredLayer:
    place = torch.device("cpu")
    return TieredLayer(
        LAYER,
        layer_options(
            device=place, ledger=Ledger(("mass",)), parking=OffloadSpec(recall, None, codec)
        ),
    )


def fill(store: TieredLayer, count: int = 70, seed: int = 0) -> None:
    """Tokens in goes of any size, parked after each; the latest always stays."""
    source, start = Random(seed), 0
    while start < count:
        size = min(source.choice([1, 3, 30]), count - start)
        append(store, draw(store.layer, size, start, seed))
        own = [sorted({*source.sample(range(n), n // 3), n - 1}) for n in store.lengths]
        store.apply(a_plan(own, list(store.lengths)))
        start += size


def twins(codec: Codec, recall: RecallPart = EVERYTHING) -> tuple[TieredLayer, TieredLayer]:
    """A rounded store, and an exact one with the same history."""
    place = torch.device("cpu")
    stores = (
        a_store(codec, recall),
        TieredLayer(
            LAYER,
            layer_options(device=place, ledger=Ledger(("mass",)), parking=OffloadSpec(recall)),
        ),
    )
    for store in stores:
        fill(store)
    return stores


def entries_of_both_tiers(store: TieredLayer, parked: Entries) -> list[list[Entry]]:
    """All of both tiers, head by head."""
    heads = []
    for head in range(2):
        own = []
        for held in (store.entries(), parked):
            rows = held.head_positions(head), held.head_keys(head), held.head_values(head)
            own += [Entry(int(p), k.clone(), v.clone()) for p, k, v in zip(*rows, strict=True)]
        heads.append(own)
    return heads


@pytest.mark.parametrize("name", CODECS)
def test_slow_tier_is_quantized_by_group_with_exact_remainder(name) -> None:
    codec = CODECS[name]
    store, exact = twins(codec)
    got, true = store.parked(), exact.parked()
    assert got.lengths == true.lengths and min(got.lengths) > 2 * GROUP
    for head, length in enumerate(got.lengths):
        assert torch.equal(got.head_positions(head), true.head_positions(head))
        full = length // GROUP * GROUP
        for side in ("head_keys", "head_values"):
            decoded, numbers = getattr(got, side)(head), getattr(true, side)(head)
            assert torch.equal(decoded[full:], numbers[full:])
            assert not torch.equal(decoded[:full], numbers[:full])
            for entry in range(full):
                first = entry // GROUP * GROUP
                for d in range(LAYER.head_dim):
                    if side == "head_keys":
                        among = numbers[first : first + GROUP, d]
                    else:
                        among = numbers[entry, d // GROUP * GROUP : (d // GROUP + 1) * GROUP]
                    step = float(among.max() - among.min()) / (2**codec.key_bits - 1)
                    away = abs(float(decoded[entry, d] - numbers[entry, d]))
                    assert away <= step / 2 + 4e-3


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("recall", [EVERYTHING, Bounds(tokens=400, page=4, dense=0)])
def test_attention_uses_decoded_values(queries, recall) -> None:
    store, _ = twins(CODECS["int4"], recall)
    new, held = draw(LAYER, queries, 70, 1), entries_of_both_tiers(store, store.parked())
    got = extend(store, new)
    for h in range(LAYER.query_heads):
        for q in range(queries):
            among = [Entry(0, new.keys[h // 2, i], new.values[h // 2, i]) for i in range(q + 1)]
            expected = attend_one(new.queries[h, q], held[h // 2] + among, LAYER.scaling)
            assert_close(got[h, q], expected)


def test_page_is_reloaded_after_its_quantization() -> None:
    store = a_store(CODECS["int4"], Flat(tokens=400, page=GROUP, dense=0))
    append(store, draw(LAYER, GROUP - 1))
    store.apply(a_plan([[GROUP - 2]] * 2, [GROUP - 1] * 2))
    extend(store, draw(LAYER, 1, GROUP))
    append(store, draw(LAYER, 3, GROUP + 1))
    for left in ([4], [0]):  # none of the page's own number changes with the second
        size = store.lengths[0]
        store.apply(a_plan([left] * 2, [size] * 2))
        new, fresh = draw(LAYER, 1, GROUP + 9, 3), store.fork()
        assert_close(extend(store, new), extend(fresh, new))
        store.truncate(GROUP + 9)


def test_restored_store_and_fork_continue_identically() -> None:
    recall = Flat(tokens=8, page=4, dense=0)
    store, _ = twins(CODECS["apart"], recall)
    store.compact()
    state = store.state()
    twin, fork = TieredLayer.restore(LAYER, state), store.fork()
    assert same_bits(state, twin.state()) and same_bits(state, fork.state())
    for start in range(70, 70 + 2 * GROUP):
        new = draw(LAYER, 1, start, 1)
        outs = [extend(each, new) for each in (twin, fork)]
        assert torch.equal(*outs)
        for each in (twin, fork):
            size = each.lengths[0], each.lengths[1]
            each.evict(a_plan([list(range(1, n)) for n in size], list(size)))
    assert same_bits(twin.state(), fork.state())
    assert same_bits(store.state(), state)


def test_bytes_decrease_with_the_bits() -> None:
    held = []
    for codec in (None, CODECS["int8"], CODECS["int4"]):
        layer = replace(LAYER, head_dim=64)
        parking = OffloadSpec(EVERYTHING, None, codec and replace(codec, group=32))
        store = TieredLayer(layer, layer_options(parking=parking))
        append(store, draw(layer, 1025))
        store.apply(a_plan([[1024]] * 2, [1025] * 2))
        store.compact()
        assert store.nbytes == sum(t.untyped_storage().nbytes() for t in store.tensors())
        held.append(store._slow.nbytes / 2048)
    assert held[0] > 512
    assert held[1] < 2 * (64 + 8) + 12 and held[2] < 2 * (32 + 8) + 12


def test_truncate_removes_codes() -> None:
    store, _ = twins(CODECS["int8"])
    before = store.parked()
    store.truncate(40)
    after = store.parked()
    for head in range(2):
        stays = before.head_positions(head) < 40
        assert torch.equal(after.head_positions(head), before.head_positions(head)[stays])
        keys = before.head_keys(head)[stays]
        assert (after.head_keys(head) - keys).abs().max() < 0.02


def test_failed_quantization_changes_nothing(monkeypatch) -> None:
    store, _ = twins(CODECS["int8"])
    before = store.state()
    append(store, draw(LAYER, 9, 70))
    kept = [[n - 1] for n in store.lengths]

    def fail(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(store._ragged, "apply", fail)
        with pytest.raises(MemoryError):
            store.apply(a_plan(kept, list(store.lengths)))
    store.entries().keys.mul_(1e6)
    with pytest.raises(CacheError, match="float16"):
        store.apply(a_plan(kept, list(store.lengths)))
    store.truncate(70)
    after = store.state()
    assert all(torch.equal(after[n], t) for n, t in before.items() if n.startswith("slow."))
    assert isinstance(store._slow, QuantizedSlowTier)
