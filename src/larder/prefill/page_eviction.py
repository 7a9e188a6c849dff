"""Evictions behind decode steps over pages: limits for kernels, where a policy needs no plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from larder.cache.page_evictions import LayerLimits, PageEviction, supports
from larder.core.plan import StepMerging, StepRule
from larder.models.observers import LayerActivations, Observer, StepObserver
from larder.policy.planner import Planner

if TYPE_CHECKING:
    from larder.cache.forms.paged import PagedLayer
    from larder.cache.step_layout import SequenceEviction
    from larder.cache.step_tables import StepTables
    from larder.prefill.decode_eviction import SequenceStep


class PagedObserver(StepObserver):
    """Observer of a pass of single tokens over pages, of which kernels evict what they can.

    Args:
        observer: receives the layers of segments that kernels do not evict from.
        rule: of the planner.
        tokens: M, entries per kv head averaged over the managed layers.
    """

    def __init__(
        self,
        observer: Observer,
        planner: Planner,
        rule: StepRule,
        tokens: int,
        segments: Sequence[SequenceStep],
    ) -> None:
        self._observer, self._planner, self._rule = observer, planner, rule
        self._tokens, self._segments = tokens, segments
        self._done = frozenset[int]()

    def __call__(self, segment: int, layer: int, activations: LayerActivations) -> None:
        if segment not in self._done:
            self._observer(segment, layer, activations)

    def page_evictions(
        self, segments: Sequence[int], like: StepMerging | None = None
    ) -> dict[int, PageEviction]:
        merging = self._rule.merging
        if not supports(self._rule) or not isinstance(merging, StepMerging | None):
            return {}
        if merging and like and (merging.scalar, merging.slack) != (like.scalar, like.slack):
            return {}
        found: dict[int, PageEviction] = {}
        for segment in segments:
            limits = self._limits(self._segments[segment])
            if limits is not None:
                found[segment] = PageEviction(limits, merging)
        self._done = frozenset(found)
        return found

    def step_evictions(self, layouts: Sequence[StepTables]) -> dict[int, SequenceEviction]:
        del layouts
        return {}

    def end_step(self, done: Mapping[int, Sequence[int]]) -> bool:
        del done
        return False

    def _limits(self, segment: SequenceStep) -> dict[int, LayerLimits] | None:
        """Limits of the layers of a segment; None where it needs plans."""
        found: dict[int, LayerLimits] = {}
        for layer, quota in segment.quotas.items():
            store = segment.cache.layers[layer]
            if store.page_lease is None or store.layer.sinks:
                return None
            own = LayerLimits()
            if segment.is_due:
                own = self._layer_limits(cast("PagedLayer", store), quota)
            if own is None:
                return None
            found[layer] = own
        return found

    def _layer_limits(self, store: PagedLayer, quota: int) -> LayerLimits | None:
        """Limits of a layer; None where a head loses more than one entry, or shares are unknown."""
        kept = store.step_quota(self._planner.budget, quota, self._tokens)
        if kept is None or int(store.page_lease.lengths.max()) > kept.count:
            return None
        ends = self._planner.protect.ends(kept.protected_by)
        return LayerLimits(kept.count, max(ends.first, self._planner.watermark), ends.last)
