"""Caches that are stored with 4 bits and restored as they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import Mode, ModelSpec
from larder.models import BatchSegment, Decoder, wrap_model
from larder.prefill import append_text
from larder.store import ByteBudgets, CacheRequirements, CacheSnapshot, LoadedSession, Store, Tier
from store.caches import (
    IDS,
    POLICY,
    SPEC,
    TALK,
    WHO,
    compressed,
    identity,
    load,
    read,
    save,
    store_at,
)
from store.caches import snapshot as snapshot_of
from tiny_models import tiny

NEXT = tuple(range(40, 60))
LONG = tuple(range(10, 50))  # more than half of a group of 64


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = store_at(tmp_path)
    yield opened
    opened.close()


def restored(found: LoadedSession) -> SequenceCache:
    assert found.cache is not None, found.reason
    return found.cache


def test_restored_cache_holds_codes_only(store: Store) -> None:
    save(store, IDS, "q4")
    found = load(store)
    state = restored(found).state()
    assert found.record.codec == "q4" and not found.record.lossless
    assert restored(found).next_position == len(IDS)
    assert restored(found).lengths() == read(IDS).lengths()
    for layer in SPEC.layers:
        assert not len(state[f"{layer.index}.keys"]), "numbers that are not quantized"
        for side in ("keys", "values"):
            codes = state[f"{layer.index}.grade1.{side}.stored"]
            assert codes.dtype is torch.uint8
            assert codes.shape == (layer.kv_heads * len(IDS), layer.head_dim // 2)


def test_q4_values_equal_int4_decoding(store: Store) -> None:
    save(store, IDS, "q4", "codes")
    save(store, IDS, "int4", "decoded")
    codes, decoded = restored(load(store, "codes")), restored(load(store, "decoded")).state()
    for layer in range(len(SPEC.layers)):
        held = codes.entries(layer)
        for side, numbers in (("keys", held.keys), ("values", held.values)):
            assert torch.equal(numbers, decoded[f"{layer}.{side}"].flatten(0, 1))


def saved_and_restored(
    store: Store, cache: SequenceCache, ids: tuple[int, ...], spec: ModelSpec
) -> SequenceCache:
    taken = CacheSnapshot(cache, identity(spec), POLICY, "q4")
    store.sessions.save(WHO, TALK, ids, taken)
    found = store.sessions.load(WHO, TALK, CacheRequirements(identity(spec), POLICY, spec))
    assert found is not None
    return restored(found)


def first_keys(cache: SequenceCache, count: int) -> Tensor:
    """Keys of the first tokens of the first kv head."""
    return cache.entries(0).keys[:count]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return wrap_model(tiny("qwen3", layers=2))


def test_stored_codes_are_not_requantized(store: Store, decoder: Decoder) -> None:
    cache, ids = SequenceCache(decoder.spec, "dense"), LONG
    append_text(decoder, cache, LONG)
    cache = saved_and_restored(store, cache, ids, decoder.spec)
    for number in range(3):
        codes, new = first_keys(cache, len(ids)).clone(), NEXT[4 * number : 4 * number + 4]
        append_text(decoder, cache, new)
        exact = first_keys(cache, len(ids) + 4).clone()
        assert torch.equal(exact[: len(ids)], codes)
        cache = saved_and_restored(store, cache, ids + new, decoder.spec)
        again = first_keys(cache, len(ids) + 4)
        assert torch.equal(again[: len(LONG)], codes[: len(LONG)])
        assert 0 < (again - exact)[len(LONG) :].abs().max() < 0.2 * exact.abs().max()
        ids += new


def test_attention_uses_the_codes(store: Store, decoder: Decoder) -> None:
    cache = SequenceCache(decoder.spec, "dense")
    append_text(decoder, cache, IDS)
    found = saved_and_restored(store, cache, IDS, decoder.spec)
    plain = SequenceCache(decoder.spec, "dense")
    for layer in decoder.spec.layers:
        held = found.entries(layer.index)
        keys, values = (
            side.unflatten(0, (layer.kv_heads, -1)) for side in (held.keys, held.values)
        )
        plain.layers[layer.index].append(keys, values, torch.arange(len(IDS)))
    plain.advance(len(IDS))
    logits = [
        decoder.forward_logits([BatchSegment(each, NEXT)], Mode.SCRATCH, range(len(NEXT)))
        for each in (found, plain, cache)
    ]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-4)
    assert (logits[0] - logits[2]).abs().max() > 1e-3


def test_other_cache_forms_are_decoded(store: Store) -> None:
    store.sessions.save(WHO, TALK, IDS, snapshot_of(compressed(IDS), "q4"))
    cache = restored(load(store))
    assert cache.cache_spec.form == "ragged"
    assert cache.lengths() == compressed(IDS).lengths()


def test_values_beyond_float16_are_stored_exactly(store: Store) -> None:
    state = read(IDS).state()
    state["0.keys"][0, 3, 2] = 1e6
    cache = SequenceCache.restore(SPEC, state, read(IDS).meta())
    store.sessions.save(WHO, TALK, IDS, snapshot_of(cache, "q4"))
    held = restored(load(store)).entries(0)
    assert held.keys.max() == 1e6
    assert not store.parts.unwritten.counts()


def test_q4_copies_are_charged_to_host_memory(tmp_path: Path) -> None:
    count = read(IDS).nbytes
    limits = [2 * count - 1, 2 * count]
    for limit in limits:
        store = store_at(tmp_path / str(limit), budgets=ByteBudgets({Tier.HOST: limit}))
        save(store, IDS, "q4")
        assert store.parts.unwritten.counts() == ({} if limit == limits[1] else {"budget": 1})
        assert store.parts.ledger.used(Tier.HOST) == 0
        store.close()
