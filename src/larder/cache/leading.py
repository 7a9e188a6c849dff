"""Which layers use what another one finds."""

from __future__ import annotations

from collections.abc import Sequence

from larder.cache.base import Store
from larder.cache.tiered import Tiered, tiered


def follow(stores: Sequence[Store]) -> None:
    """Have layers use what others find, as their recall part says."""
    parking = [store for store in tiered(stores) if not store.is_dense]
    for place, store in enumerate(parking):
        leader = parking[store.parking.recall.leading(place)]
        store.leader = leader if leader is not store and _alike(leader, store) else None


def _alike(left: Tiered, right: Tiered) -> bool:
    """Whether two layers have as many heads of either kind."""
    pair = left.layer, right.layer
    return len({(layer.kv_heads, layer.query_heads) for layer in pair}) == 1
