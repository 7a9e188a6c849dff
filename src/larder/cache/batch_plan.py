"""Plans of a decode step over all layers of several sequences, carried out together.

Policies whose steps amount to a `StepRule` evict from all layers in one call of a kernel that also
scores. All others make a plan per layer; a `BatchPlan` collects those of a pass, and moves the
entries of all of them in one call. Storage, starts and lengths change in place, so that the tables
of a `StepLayout` stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from larder.cache.forms.base import CacheLayer
from larder.cache.row_updates import PlannedEviction
from larder.cache.sequence import SequenceCache
from larder.core.plan import Plan
from larder.ops.removal import MIN_ROAMING_SLACK, plan_removals


class BatchPlan:
    """Plans of one pass, one per layer and sequence at most; used once.

    Until `evict` no cache has changed. Entries and bits are those of `SequenceCache.evict`, plan by
    plan, which also carries out the plans of layers that are not plain ragged storage.
    """

    def __init__(self) -> None:
        self._plans: list[tuple[SequenceCache, int, Plan]] = []

    def __len__(self) -> int:
        return len(self._plans)

    @staticmethod
    def can_defer(cache: SequenceCache) -> bool:
        """True if no layer's plan depends on whether that of another layer is carried out."""
        spans_layers = any(layer.spans_layers for layer in cache.layers)
        return not spans_layers and not cache.spec.last_readers

    def add(self, cache: SequenceCache, layer: int, plan: Plan) -> None:
        """Add the plan of a layer, to be carried out by `evict`."""
        self._plans.append((cache, layer, plan))

    def evict(self) -> None:
        """Carry out all plans; rejected entries become slack for the next tokens.

        Raises:
            CacheError: a plan does not fit its layer. If that is plain ragged storage, nothing has
                changed.
        """
        plans, self._plans = self._plans, []
        others: list[tuple[SequenceCache, int, Plan]] = []
        joint: list[tuple[SequenceCache, CacheLayer, PlannedEviction]] = []
        for cache, layer, plan in plans:
            own = cache.step_layer(layer)
            eviction = own.plan_eviction(plan)
            if eviction is None:
                others.append((cache, layer, plan))
            else:
                joint.append((cache, own, eviction))
        if joint:
            _remove(joint)
        for cache, layer, plan in others:
            cache.evict(layer, plan)


def _remove(evictions: Sequence[tuple[SequenceCache, CacheLayer, PlannedEviction]]) -> None:
    """Remove the rejected entries of layers in storage of their own."""
    table = plan_removals([own.removal for _, _, own in evictions], MIN_ROAMING_SLACK)
    for cache in dict.fromkeys(cache for cache, _, _ in evictions):
        cache.count_eviction()
    rooms = table.move()
    for (_, layer, own), room in zip(evictions, rooms, strict=True):
        layer.finish_eviction(own, room)
