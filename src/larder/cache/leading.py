"""Which layers use what another one finds."""

from __future__ import annotations

from collections.abc import Sequence

from larder.cache.forms.base import CacheLayer
from larder.cache.forms.tiered import TieredLayer, tiered_layers


def link_recall_leaders(stores: Sequence[CacheLayer]) -> None:
    """Have layers use what others find, as their recall part says."""
    parking = [store for store in tiered_layers(stores) if not store.is_dense]
    for place, store in enumerate(parking):
        leader = parking[store.parking.recall.leading(place)]
        store.leader = leader if leader is not store and _same_heads(leader, store) else None


def _same_heads(left: TieredLayer, right: TieredLayer) -> bool:
    """Whether two layers have as many heads of either kind."""
    pair = left.layer, right.layer
    return len({(layer.kv_heads, layer.query_heads) for layer in pair}) == 1
