"""A range of positions is forgotten for good, wherever entries of it lie."""

from __future__ import annotations

from builders import a_layer, a_plan, draw, layer_options
from cache_stores import append, assert_close, extend
from larder.cache import TieredLayer
from larder.core import OffloadSpec
from larder.recall import Flat

LAYER = a_layer(2, 2)


def a_tiered(dense: int) -> TieredLayer:
    parking = OffloadSpec(Flat(tokens=400, page=4, dense=dense))
    return TieredLayer(LAYER, layer_options(parking=parking))


def test_dropped_range_is_in_neither_tier() -> None:
    store, other = a_tiered(0), a_tiered(0)
    text, new = draw(LAYER, 40), draw(LAYER, 1, 40, 3)
    append(store, text)
    store.apply(a_plan([range(0, 40, 3), range(35, 40)], [40, 40]))
    extend(store, new)
    store.truncate(40)
    store.drop_range(10, 30)
    assert [sum(pair) for pair in zip(store.lengths, store.parked().lengths, strict=True)] == [
        20,
        20,
    ]
    append(other, text.part(0, 10))
    append(other, text.part(30, 40))
    assert_close(extend(store, new), extend(other, new))


def test_dense_layer_of_a_tiered_form_drops_a_range() -> None:
    store = a_tiered(1)
    append(store, draw(LAYER, 6))
    store.drop_range(2, 5)
    assert store.entries().head_positions(1).tolist() == [0, 1, 5]
