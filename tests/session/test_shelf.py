"""How the caches of a conversation change places."""

from __future__ import annotations

import torch

from larder.cache.sequence import Form, SequenceCache
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import Mode
from larder.session.shelf import Shelf

SPEC = ModelSpec(
    (LayerSpec(0, 4, 2, 8, 0.3), LayerSpec(1, 4, 2, 8, 0.3)),
    torch.float32,
    torch.device("cpu"),
)


def test_a_shelf_with_a_cache_replaced_shares_all_others() -> None:
    shelf = Shelf(SPEC, [_cache(3), _cache(5)])
    active = shelf.activate(0)
    grown = shelf.holding(2, _cache(7)).holding(1, _cache(9))
    assert [holding.next_position for holding in grown.holdings()] == [3, 9, 7]
    assert grown.activate(0) is active
    assert [holding.next_position for holding in shelf.holdings()] == [3, 5]


def test_a_replaced_cache_is_no_longer_active() -> None:
    shelf = Shelf(SPEC, [_cache(3)])
    shelf.activate(0)
    replaced = shelf.holding(0, _cache(4))
    assert replaced.active is None
    assert replaced.activate(0).next_position == 4


def test_a_shelf_at_rest_holds_everything_once() -> None:
    shelf = Shelf(SPEC, [_cache(3), _cache(5)])
    shelf.activate(1)
    active_bytes = shelf.nbytes - shelf.parked_bytes
    assert active_bytes == shelf.holdings()[1].nbytes
    shelf.rest()
    assert shelf.active is None and shelf.nbytes == shelf.parked_bytes
    assert len(shelf) == 2


def _cache(tokens: int) -> SequenceCache:
    cache = SequenceCache(SPEC, Form.RAGGED)
    for layer in SPEC.layers:
        queries = torch.randn(layer.query_heads, tokens, layer.head_dim)
        keys = torch.randn(layer.kv_heads, tokens, layer.head_dim)
        positions = torch.arange(tokens)
        cache.attend(layer.index, queries, keys, keys, positions, Mode.APPEND, (tokens,))
    cache.advance(tokens)
    return cache
