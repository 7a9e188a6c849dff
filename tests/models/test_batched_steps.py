"""Decode steps of many sequences in one call: the bits of each sequence alone, and its bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from builders import a_layer, a_spec
from larder.cache import CacheLayer, NewTokens, SequenceCache, storage_bytes
from larder.core import LOG_COUNT, LayerSpec, Ledger, Mode, Plan
from larder.models import AttentionInputs, BatchSegment, ForwardBatch
from larder.ops import c_library

CPU = torch.device("cpu")
LAYER = a_layer(2, 3)
SINKS = tuple(torch.linspace(-2, 2, 21).tolist())
LAYERS = (
    LAYER,
    replace(a_layer(3, 7), sinks=SINKS),
    replace(a_layer(1, 16), head_dim=80),
    replace(a_layer(2, 1), head_dim=1),
    a_layer(2, 2, window=5),
)
LEDGER = Ledger((LOG_COUNT, "mass"))


@st.composite
def rows(draw: Any) -> list[tuple[str, int, int, int]]:
    """Form, entries, seed of an eviction (0 for none) and new tokens of each sequence."""
    row = st.tuples(
        st.sampled_from(["dense", "ragged"]),
        st.integers(0, 40),
        st.integers(0, 3),
        st.sampled_from([1, 1, 1, 4, 33]),  # of 33, a block that shares the call
    )
    return draw(st.lists(row, min_size=1, max_size=5))


def cache_of(
    row: tuple[str, int, int, int], dtype: torch.dtype, layer: LayerSpec = LAYER
) -> SequenceCache:
    """Cache with a history of appends and, where it is ragged, one eviction per head.

    Of a layer with two kv heads: others are forked.
    """
    form, entries, seed, _ = row
    spec = a_spec(layer, dtype=dtype)
    cache = SequenceCache(spec, form, LEDGER if form == "ragged" else Ledger())
    source = torch.Generator().manual_seed(entries)
    if entries:
        append(cache, entries, source)
    if seed and layer != LAYER:
        cache = cache.fork()
    elif form == "ragged" and entries and seed:
        drop = [torch.randperm(entries, generator=source)[: seed + head] for head in range(2)]
        stays = torch.ones(2, entries, dtype=torch.bool)
        for head, gone in enumerate(drop):
            stays[head, gone] = False
        (cache.evict if seed > 1 else cache.apply)(
            0, Plan.from_mask(stays.flatten(), (entries, entries))
        )
        cache.write_columns(
            0, {LOG_COUNT: torch.rand(len(cache.entries(0).positions), generator=source)}
        )
    cache.record_logits([0])
    return cache


def sides(
    count: int, source: torch.Generator, dtype: torch.dtype, layer: LayerSpec = LAYER
) -> list[Tensor]:
    """Queries, keys and values of new tokens."""
    return [
        torch.randn(heads, count, layer.head_dim, generator=source).to(dtype)
        for heads in (layer.query_heads, layer.kv_heads, layer.kv_heads)
    ]


def append(cache: SequenceCache, count: int, source: torch.Generator) -> None:
    attend([(cache, sides(count, source, cache.spec.dtype, cache.spec.layers[0]))])


def attend(pairs: list[tuple[SequenceCache, list[Tensor]]]) -> Tensor:
    """Attention of new tokens of some caches in one forward batch, which appends them."""
    segments = [BatchSegment(cache, (7,) * new[0].shape[1]) for cache, new in pairs]
    batch = ForwardBatch(segments, Mode.APPEND, CPU, None)
    queries, keys, values = (torch.cat([new[side] for _, new in pairs], 1) for side in range(3))
    layer = pairs[0][0].spec.layers[0]
    inputs = AttentionInputs(0, queries, keys, values, layer.scaling, layer.sliding_window)
    out = batch.attend(inputs)
    batch.finish()
    return out


def of_cache(cache: SequenceCache, new: list[Tensor]) -> Tensor:
    """Attention as the cache of one sequence gives it: the loop."""
    count = new[0].shape[1]
    positions = torch.arange(cache.next_position, cache.next_position + count)
    queries, keys, values = new
    out = cache.attend(0, NewTokens(queries, keys, values, positions, Mode.APPEND))
    cache.advance(count)
    return out


@pytest.mark.skipif(c_library() is None, reason="C kernels were not compiled")
@given(
    rows(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 3),
    st.sampled_from(LAYERS),
)
def test_batched_steps_equal_single_steps_bitwise(drawn, dtype, steps, layer) -> None:
    result = [
        (
            cache_of(row, dtype, layer),
            cache_of(row, dtype, layer),
            sides(row[3], generator(n), dtype, layer),
        )
        for n, row in enumerate(drawn)
    ]
    for _ in range(steps):
        batched = attend([(cache, new) for cache, _, new in result]).split(
            [row[3] for row in drawn], 1
        )
        for (cache, alone, new), out in zip(result, batched, strict=True):
            assert torch.equal(out, of_cache(alone, new))
            assert_equal(cache, alone)
            assert_equal_logits(cache.layers[0], alone.layers[0])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + seed)


def assert_equal_logits(layer: CacheLayer, alone: CacheLayer) -> None:
    """Assert that both recorded the same logits, or none."""
    logits, others, held = layer.take_logits(), alone.take_logits(), alone.entries()
    if logits is None or others is None:
        assert logits is others
        return
    for start, length in zip(held.starts, held.lengths, strict=True):
        own = slice(start, start + length)
        assert torch.equal(logits[:, own], others[:, own])


def assert_equal(cache: SequenceCache, alone: SequenceCache) -> None:
    """Assert the same entries, columns and bytes, and that bytes are those of the tensors."""
    own, other = cache.state(), alone.state()
    assert own.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in own.items())
    assert cache.nbytes == alone.nbytes
    assert cache.nbytes == storage_bytes(t for store in cache.layers for t in store.tensors())
    if cache.spec.managed:
        assert cache.managed_entries == sum(map(sum, cache.lengths()))


@pytest.mark.skipif(c_library() is None, reason="C kernels were not compiled")
def test_plain_steps_are_batched(monkeypatch) -> None:
    caches = [cache_of((form, 9, 2, 1), torch.float32) for form in ("dense", "ragged")]

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a decode step attended alone")

    monkeypatch.setattr(SequenceCache, "attend", refused)
    attend([(cache, sides(1, generator(0), torch.float32)) for cache in caches])
    assert [cache.lengths() for cache in caches] == [((10, 10),), ((8, 7),)]


def test_out_of_memory_step_leaves_the_caches_unchanged(monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    cache = cache_of(("ragged", 9, 2, 1), torch.float32)
    before = cache.state()
    monkeypatch.setattr("larder.models.forward_batch.StepWork", fail)
    monkeypatch.setattr("larder.models.forward_batch.supports_step", lambda *_: True)
    batch = ForwardBatch([BatchSegment(cache, (7,))], Mode.APPEND, CPU, None)
    queries, keys, values = sides(1, generator(0), torch.float32)
    with pytest.raises(MemoryError):
        batch.attend(AttentionInputs(0, queries, keys, values, LAYER.scaling, None))
    batch.roll_back()
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.state().items())


@pytest.mark.skipif(c_library() is None, reason="C kernels were not compiled")
def test_out_of_memory_pass_leaves_blocks_and_steps_unchanged(monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    caches = [cache_of((form, 9, 2, 1), torch.float32) for form in ("ragged", "dense", "ragged")]
    before = [cache.state() for cache in caches]
    caches[2].record_weight_sums([0])
    monkeypatch.setattr("larder.models.batch_segment.attend_segments", fail)
    monkeypatch.setattr("larder.ops.block_attention.is_faster", lambda *_: True)
    counts = (1, 40, 33)
    pairs = zip(caches, counts, strict=True)
    segments = [BatchSegment(cache, (7,) * count) for cache, count in pairs]
    batch = ForwardBatch(segments, Mode.APPEND, CPU, None)
    queries, keys, values = sides(sum(counts), generator(0), torch.float32)
    with pytest.raises(MemoryError):
        batch.attend(AttentionInputs(0, queries, keys, values, LAYER.scaling, None))
    batch.roll_back()
    for cache, state in zip(caches, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in cache.state().items())
    assert caches[2].layers[0].take_weight_sums() is None  # nothing has written them
