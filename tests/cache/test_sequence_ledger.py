"""Columns and scalars of a sequence cache: in managed layers, through every change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from builders import a_layer, a_plan, a_spec, draw
from cache_stores import same_bits
from larder.cache import NewTokens, SequenceCache
from larder.core import LOG_COUNT, CacheError, Ledger, Mode
from tensor_memory import reachable_tensors, storage_bytes

LAYERS = (a_layer(2, 2), a_layer(1, 3, window=6, index=1), a_layer(3, 1, index=2))
SPEC = a_spec(*LAYERS)
LEDGER = Ledger(("mass", LOG_COUNT), ("threshold", "mean"))
MANAGED, READ = (0, 2), 14


def read(cache: SequenceCache, count: int) -> list[Tensor]:
    start, outs = cache.next_position, []
    for layer in SPEC.layers:
        new = draw(layer, count, start)
        tensors = (new.queries, new.keys, new.values, new.positions)
        outs.append(cache.attend(layer.index, NewTokens(*tensors, Mode.APPEND)))
    cache.advance(count)
    return outs


def identities(cache: SequenceCache, layer: int) -> Tensor:
    """A number for every packed entry that tells it from all others, small enough for a logit."""
    entries = cache.entries(layer)
    heads = range(len(entries.lengths))
    return torch.cat([(layer + 1) / 8 + h + entries.head_positions(h) / 64 for h in heads])


def remembering() -> SequenceCache:
    """Uneven heads, whose entries know who they are; one scalar of two is written."""
    cache = SequenceCache(SPEC, "ragged", LEDGER)
    read(cache, READ)
    for index in MANAGED:
        heads = LAYERS[index].kv_heads
        own = cache.entries(index).unpack(identities(cache, index))
        cache.write_columns(index, {"mass": own, LOG_COUNT: own / 4})
        plan = a_plan([range(h, READ, 2 + h) for h in range(heads)], [READ] * heads)
        scalars = {"mean": index + torch.arange(heads) / 2}
        (cache.apply if index else cache.evict)(index, replace(plan, scalars=scalars))
    return cache


def assert_remembers(cache: SequenceCache, until: int = READ) -> None:
    for index in MANAGED:
        entries = cache.entries(index)
        old = entries.packed_positions() < until
        expected = torch.where(old, identities(cache, index), 0.0)
        assert torch.equal(entries.column("mass"), expected)
        assert torch.equal(entries.column(LOG_COUNT), expected / 4)
        heads = LAYERS[index].kv_heads
        assert torch.equal(entries.scalars["mean"], index + torch.arange(heads) / 2)
        assert entries.scalars["threshold"].isnan().all()
    window = cache.entries(1)
    assert not window.columns and not window.scalars


def alike(left: SequenceCache, right: SequenceCache) -> bool:
    return same_bits(left.state(), right.state()) and left.meta() == right.meta()


def through_a_file(cache: SequenceCache) -> SequenceCache:
    return SequenceCache.restore(SPEC, load(save(cache.state())), cache.meta())


def adopted(cache: SequenceCache) -> SequenceCache:
    return SequenceCache.adopt(SPEC, cache.state(), cache.meta())


def surrendered(cache: SequenceCache) -> SequenceCache:
    meta = cache.meta()
    handed = cache.release_state(torch.device("cpu"))
    left = cache.entries(0)
    assert left.lengths == (0, 0) and left.columns.keys() == {"mass", LOG_COUNT}
    return SequenceCache.adopt(SPEC, handed, meta)


COPIES = {
    "fork": SequenceCache.fork,
    "restore": through_a_file,
    "adopt": adopted,
    "surrender": surrendered,
}


@pytest.mark.parametrize("way", COPIES)
def test_copy_has_the_same_columns_and_continues_identically(way) -> None:
    twin, copy = remembering(), COPIES[way](remembering())
    assert_remembers(copy)
    assert (copy.cache_spec.ledger, copy.next_position) == (LEDGER, READ)
    assert alike(copy, twin)
    for size in (3, 1, 9):
        for a, b in zip(read(copy, size), read(twin, size), strict=True):
            assert torch.equal(a, b)
    assert alike(copy, twin)
    assert_remembers(copy)
    assert_remembers(COPIES[way](copy))


def test_fork_shares_no_columns() -> None:
    cache = remembering()
    before, copy = cache.state(), cache.fork()
    for index in MANAGED:
        copy.write_columns(index, {"mass": torch.zeros(len(copy.entries(index).positions))})
        lengths = copy.lengths()[index]
        everything = a_plan([range(n) for n in lengths], lengths)
        copy.evict(index, replace(everything, scalars={"mean": torch.zeros(len(lengths))}))
    assert same_bits(cache.state(), before)


CHANGES: dict[str, Callable[[SequenceCache], None]] = {
    "allocate": lambda cache: cache.allocate(20),
    "reserve": lambda cache: cache.reserve(20),
    "compact": lambda cache: (cache.reserve(20), cache.compact())[-1],
    "take_back": lambda cache: (cache.reserve(9), read(cache, 5), cache.truncate(READ))[-1],
}


@pytest.mark.parametrize("change", CHANGES)
def test_columns_stay_with_their_entries(change) -> None:
    cache = remembering()
    CHANGES[change](cache)
    assert_remembers(cache)
    read(cache, 3)
    assert_remembers(cache)
    assert cache.nbytes == storage_bytes(reachable_tensors(cache._layers))


def test_truncate_drops_columns() -> None:
    cache = remembering()
    cache.truncate(9)
    read(cache, 5)
    assert_remembers(cache, 9)


def test_interrupted_release_changes_nothing(monkeypatch) -> None:
    cache, twin = remembering(), remembering()

    def fail() -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(cache._layers[2], "state", fail)
        with pytest.raises(MemoryError):
            cache.release_state(torch.device("cpu"))
    assert alike(cache, twin)
    assert_remembers(cache)


def test_plans_and_column_writes_are_counted_and_refused_ones_are_not() -> None:
    cache = remembering()
    assert cache.plans == 4
    rows = len(cache.entries(0).positions)
    with pytest.raises(CacheError):
        cache.write_columns(0, {"moss": torch.zeros(rows)})
    with pytest.raises(CacheError, match="only managed layers of a ragged cache"):
        cache.write_columns(1, {"mass": torch.zeros(6)})
    with pytest.raises(CacheError):
        cache.evict(1, a_plan([[0]], [6]))
    assert cache.plans == 4
    cache.write_columns(0, {"mass": torch.zeros(rows)})
    assert cache.plans == 5


def test_invalidated_cache_refuses_changes() -> None:
    cache = remembering()
    cache.invalidate()
    lengths = cache.lengths()[0]
    for change in (
        lambda: cache.evict(0, a_plan([[0]] * 2, lengths)),
        lambda: cache.write_columns(0, {}),
        cache.fork,
        cache.state,
    ):
        with pytest.raises(CacheError, match="cannot be used"):
            change()


def test_only_declared_columns_are_held() -> None:
    caches = [SequenceCache(SPEC, "ragged", ledger) for ledger in (Ledger(), LEDGER)]
    for cache in caches:
        cache.allocate(10)
        assert cache.nbytes == storage_bytes(reachable_tensors(cache._layers))
    heads = sum(LAYERS[index].kv_heads for index in MANAGED)
    assert caches[1].nbytes - caches[0].nbytes == 4 * heads * (2 * 10 + 2)
    plain = caches[0]
    assert not any("column" in name or "scalar" in name for name in plain.state())
    assert SequenceCache.restore(SPEC, plain.state(), plain.meta()).cache_spec.ledger == Ledger()


def test_dense_cache_refuses_a_ledger() -> None:
    with pytest.raises(CacheError, match="does not support ledger, .*mass.*ragged"):
        SequenceCache(SPEC, "dense", LEDGER)


@pytest.mark.parametrize("lost", ["2.column.mass", "0.scalar.mean"])
def test_state_without_its_columns_is_refused(lost) -> None:
    cache = remembering()
    state = {name: held for name, held in cache.state().items() if name != lost}
    for build in (SequenceCache.restore, SequenceCache.adopt):
        with pytest.raises(CacheError, match=f"Layer {lost[0]} .* build the cache again"):
            build(SPEC, state, cache.meta())
