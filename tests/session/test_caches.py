"""Moves of a conversation's caches between active and archived places."""

from __future__ import annotations

import torch

from larder.cache import NewTokens, SequenceCache
from larder.core import LayerSpec, Mode, ModelSpec, OffloadSpec, Plan
from larder.recall import Flat
from larder.session import SessionCaches

SPEC = ModelSpec(
    (LayerSpec(0, 4, 2, 8, 0.3), LayerSpec(1, 4, 2, 8, 0.3)), torch.float32, torch.device("cpu")
)


def test_replacing_a_cache_shares_all_others() -> None:
    caches = SessionCaches(SPEC, [_cache(3), _cache(5)])
    active = caches.activate(0)
    grown = caches.with_cache(2, _cache(7)).with_cache(1, _cache(9))
    assert [holding.next_position for holding in grown.usage()] == [3, 9, 7]
    assert grown.activate(0) is active
    assert [holding.next_position for holding in caches.usage()] == [3, 5]


def test_replacement_of_the_active_cache_is_active() -> None:
    caches, other = SessionCaches(SPEC, [_cache(3)]), _cache(4)
    caches.activate(0)
    replaced = caches.with_cache(0, other)
    assert replaced.activate(0) is other
    assert caches.activate(0).next_position == 3


def test_offloaded_caches_are_held_once() -> None:
    caches = SessionCaches(SPEC, [_cache(3), _cache(5)])
    caches.activate(1)
    active_bytes = caches.nbytes - caches.offloaded_bytes
    assert active_bytes == caches.usage()[1].nbytes
    caches.offload_active()
    assert caches.active_number is None and caches.nbytes == caches.offloaded_bytes
    assert len(caches) == 2


def test_fast_tier_bytes_count_page_slots_without_offloaded_entries() -> None:
    cache = _cache(40, OffloadSpec(Flat(tokens=8, page=4, dense=0)))
    for layer in SPEC.layers:
        cache.apply(layer.index, Plan(torch.tensor([0, 1, 39, 40, 41, 79]), (3, 3)))
    caches = SessionCaches(SPEC, [cache])
    slots = 2 * 2 * 8 * (2 * 8 * 4 + 4)  # rows of all layers and heads, each with its bias
    [resting] = caches.usage()
    assert slots + 2 * 2 * 3 * (2 * 8 * 4 + 4) <= resting.fast_tier_bytes < resting.nbytes
    own = caches.activate(0)
    assert (
        resting.fast_tier_bytes <= caches.fast_tier_bytes < resting.fast_tier_bytes + 512
    )  # lengths of heads
    assert own.device_nbytes + slots == caches.fast_tier_bytes
    _read(own, 1, 40)
    tables = 512  # of heads, pages and slots; room for tokens comes with the first of them
    assert own.device_nbytes == caches.fast_tier_bytes
    own.compact()
    assert (
        resting.fast_tier_bytes + 4 * 68
        <= caches.fast_tier_bytes
        <= resting.fast_tier_bytes + 4 * 68 + 2 * tables
    )


def _cache(tokens: int, parking: OffloadSpec | None = None) -> SequenceCache:
    form = "ragged" if parking is None else "tiered"
    cache = SequenceCache(SPEC, form, parking=parking)
    _read(cache, tokens, 0)
    return cache


def _read(cache: SequenceCache, tokens: int, start: int) -> None:
    for layer in SPEC.layers:
        queries = torch.randn(layer.query_heads, tokens, layer.head_dim)
        keys = torch.randn(layer.kv_heads, tokens, layer.head_dim)
        positions = torch.arange(start, start + tokens)
        cache.attend(layer.index, NewTokens(queries, keys, keys, positions, Mode.APPEND))
    cache.advance(tokens)
