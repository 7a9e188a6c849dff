"""Eviction during decode: keeps caches within their budget while text is generated.

By plans, layer by layer; or, where a policy amounts to a `StepRule`, by one C call for all layers
of all segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.observation import Phase, ScratchPrompt
from larder.core.plan import LayerQuotas, StepRule
from larder.models.batch_segment import BatchSegment
from larder.models.observers import LayerActivations, Observer, StepObserver
from larder.ops.cpu.decode_attention import EvictionStorage
from larder.policy.planner import Planner
from larder.policy.providers.base import TokenProvider
from larder.policy.timing.base import Growth
from larder.prefill.eviction_pass import EvictionMode, EvictionPass, ScoringPhase, token_observer

if TYPE_CHECKING:  # few policies evict by a kernel, or by plans
    from larder.cache.batch_plan import BatchPlan
    from larder.cache.step_layout import SequenceEviction
    from larder.cache.step_tables import StepTables
    from larder.ops.cpu.decode_eviction import EvictionTable

# Numbers of tokens before they are read, by provider; one mapping per segment.
TokenForecast = Callable[
    [Sequence[BatchSegment], Mapping[str, TokenProvider]],
    Sequence[Mapping[str, Float[Tensor, " _"]]],
]


def no_forecast(
    segments: Sequence[BatchSegment], providers: Mapping[str, TokenProvider]
) -> Sequence[Mapping[str, Float[Tensor, " _"]]]:
    """Null forecast, for policies without token providers."""
    return [{} for _ in segments]


@dataclass(frozen=True)
class DecodeEviction:
    """Policy applied to sequences that grow token by token.

    It provides an observer for every appending pass. The observer updates tallies and evicts where
    a cache exceeds its quota by more than the timing allows: layer by layer in passes over several
    tokens or where reading a layer copies it, else after the last layer.

    Args:
        tokens: M, entries per kv head averaged over the managed layers.
        quotas: capacity per managed layer, by layer index, for each cache of the generation.
        starts: true positions of the first generated token, one per cache of the generation.
        forecast: forecast of the decoder, for policies with token providers.
        recall_entries: as in `PrefillReader`.
        max_excess: upper bound on the entries per kv head beyond the budget, whatever the timing
            allows; None for the timing alone.
    """

    planner: Planner
    tokens: int
    quotas: tuple[Mapping[int, int], ...]
    starts: tuple[int, ...]
    forecast: TokenForecast = no_forecast
    recall_entries: int = 0
    max_excess: int | None = None

    def at_turn_end(self) -> DecodeEviction:
        """Copy for the end of a turn, which allows nothing beyond the budget."""
        return replace(self, max_excess=0)

    def observer(
        self, numbers: Sequence[int], segments: Sequence[BatchSegment], steps: Sequence[int]
    ) -> Observer:
        """Observer of one pass.

        Args:
            numbers: index of each segment's cache.
            steps: tokens generated so far, one per segment.
        """
        caches = [segment.cache for segment in segments]
        lengths = [segment.cache.next_position + len(segment.ids) for segment in segments]
        triples = zip(numbers, segments, steps, strict=True)
        quotas = [self._quotas(number, segment, step) for number, segment, step in triples]
        due = [self._is_due(segment, own) for segment, own in zip(segments, quotas, strict=True)]
        for segment, own, is_due in zip(segments, quotas, due, strict=True):
            if len(segment.ids) == 1 and self.planner.needs_logits(is_due):
                segment.cache.record_logits(own)
        starts = [self.starts[number] for number in numbers]
        is_step = max(len(segment.ids) for segment in segments) == 1
        is_deferred = is_step and not self._copies(caches)
        batch = self._batch_plan(caches) if is_deferred else None
        eviction = self._eviction_pass(segments, quotas, due, lengths, starts, batch)
        observer: Observer = eviction
        if providers := self.planner.token_providers:
            expected = self.forecast(segments, providers)
            observer = token_observer(eviction, caches, list(self.quotas[0]), expected)
        rule = self.planner.step_rule if is_step else None
        calls = len(segments) * len(caches[0].spec.layers)
        if rule is None:
            return DeferredObserver(observer, calls, None, batch) if is_deferred else observer
        stepped = [
            SequenceStep(cache=cache, quotas=own, is_due=is_due, length=length)
            for cache, own, is_due, length in zip(caches, quotas, due, lengths, strict=True)
        ]
        if is_deferred:
            step = StepEviction(self.planner, rule, self.tokens, stepped)
            return DeferredObserver(observer, calls, step, batch)
        if all(cache.spec.arena is None for cache in caches):
            return observer
        from larder.prefill.page_eviction import PagedObserver  # not before there are pages

        return PagedObserver(observer, self.planner, rule, self.tokens, stepped)

    def _eviction_pass(
        self,
        segments: Sequence[BatchSegment],
        quotas: Sequence[LayerQuotas],
        due: Sequence[bool],
        lengths: Sequence[int],
        starts: Sequence[int],
        batch: BatchPlan | None,
    ) -> EvictionPass:
        """Eviction pass over the tokens of segments, which decides where a plan is due."""
        eviction = EvictionPass(
            self.planner,
            [segment.cache for segment in segments],
            self.tokens,
            quotas,
            None,
            lengths,
            Phase.DECODE,
            starts,
            EvictionMode.EVICT,
            batch=batch,
        )
        phases = [ScoringPhase.DECIDE if is_due else ScoringPhase.OBSERVE for is_due in due]
        prompts = [ScratchPrompt(r.ids, (0, n)) for r, n in zip(segments, lengths, strict=True)]
        eviction.begin_pass(prompts, phases, 0)
        return eviction

    def _batch_plan(self, caches: Sequence[SequenceCache]) -> BatchPlan | None:
        """Plans to be carried out together; None where one may depend on another."""
        from larder.cache.batch_plan import BatchPlan  # few policies evict while they decode

        can_defer = all(BatchPlan.can_defer(cache) for cache in caches)
        return BatchPlan() if can_defer and not self.planner.budget.replans else None

    def _copies(self, caches: Sequence[SequenceCache]) -> bool:
        """True if reading the entries of a layer copies them."""
        return any(
            cache.layers[layer].entries_copy_bytes for cache in caches for layer in self.quotas[0]
        )

    def _quotas(self, number: int, segment: BatchSegment, step: int) -> dict[int, int]:
        timing, layers = self.planner.timing, len(segment.cache.spec.layers)
        if not timing.varies_by_layer:
            quotas = self.quotas[number].items()
            return {layer: timing.quota(quota, self.tokens, step) for layer, quota in quotas}
        appended = segment.cache.next_position + len(segment.ids) - self.starts[number]
        return {
            layer: timing.layer_quota(q, self.tokens, Growth(step, appended, layer / layers))
            for layer, q in self.quotas[number].items()
        }

    def _is_due(self, segment: BatchSegment, quotas: LayerQuotas) -> bool:
        """True if the cache exceeds its capacity once the segment is read."""
        excess = self.planner.timing.excess()
        if excess is None:
            return False
        if self.max_excess is not None:
            excess = min(excess, self.max_excess)
        layers, new = segment.cache.layers, len(segment.ids)
        if not any(tier.has_offloaded for tier in segment.cache.tiers):
            excess += self.recall_entries
        heads = {layer: layers[layer].layer.kv_heads for layer in quotas}
        held = {layer: layers[layer].usage.entries + new * heads[layer] for layer in quotas}
        allowed = {layer: (quota + excess) * heads[layer] for layer, quota in quotas.items()}
        return self.planner.budget.is_plan_due(held, allowed) or self._is_rounding_due(
            segment, quotas, excess
        )

    def _is_rounding_due(self, segment: BatchSegment, quotas: LayerQuotas, excess: int) -> bool:
        """True if entries at full precision exceed their capacity once the segment is read."""
        storage, spec = self.planner.storage, segment.cache.spec
        if not storage.codecs:
            return False
        finest, itemsize = segment.cache.full_precision_lengths(), spec.dtype.itemsize
        capacity = {
            i: storage.full_precision_entries(q, spec.layers[i], itemsize)
            for i, q in quotas.items()
        }
        return any(
            sum(finest[layer]) > (capacity[layer] + excess - len(segment.ids)) * len(finest[layer])
            for layer in quotas
        )


class DeferredObserver(StepObserver):
    """Observer that buffers the activations of a pass of single tokens until its last layer.

    Eviction between layers runs with cold processor caches, since the model's weights pass through
    them. Done for all layers at the end of the pass, the work of H2O took a quarter less time. The
    buffer holds queries and recorded logits of every layer: for single tokens, less than a
    hundredth of the entries; plans of a batch hold 8 bytes for each kept entry beside it. A pass
    that fails halfway has changed nothing: where one call runs all layers and evicts behind the
    attention of each, while entries are in the caches, its evictions are undone. Used once.

    Args:
        observer: receives the calls in their order, but those of layers that a kernel has done.
        calls: number of calls of the pass: one per layer and segment.
        eviction: what a kernel carries out first; None to leave all layers to the observer.
        batch: plans that the observer makes, carried out behind its last call; None where it
            carries them out itself.
    """

    def __init__(
        self,
        observer: Observer,
        calls: int,
        eviction: StepEviction | None = None,
        batch: BatchPlan | None = None,
    ) -> None:
        self._observer, self._calls, self._eviction = observer, calls, eviction
        self._batch = batch
        self._done: set[tuple[int, int]] | None = None
        self._buffer: list[tuple[int, int, LayerActivations]] = []

    def __call__(self, segment: int, layer: int, activations: LayerActivations) -> None:
        self._buffer.append((segment, layer, activations))
        if len(self._buffer) == self._calls:
            calls, self._buffer = self._buffer, []
            done = self._done
            if done is None:
                done = set() if self._eviction is None else self._eviction.run()
            for segment, layer, activations in calls:
                if (segment, layer) not in done:
                    self._observer(segment, layer, activations)
            if self._batch is not None:
                self._batch.evict()

    def step_evictions(self, layouts: Sequence[StepTables]) -> dict[int, SequenceEviction]:
        return {} if self._eviction is None else self._eviction.by_layouts(layouts)

    def kept_evictions(self, layouts: Sequence[StepTables]) -> dict[int, SequenceEviction] | None:
        return None if self._eviction is None else self._eviction.kept_by_layouts(layouts)

    def end_step(self, done: Mapping[int, Sequence[int]]) -> bool:
        self._done = {(segment, layer) for segment, layers in done.items() for layer in layers}
        num_layers = 0 if self._eviction is None else self._eviction.num_layers
        return 0 < num_layers == len(self._done)


@dataclass(frozen=True)
class SequenceStep:
    """One segment of a pass of single tokens.

    Args:
        quotas: entries per kv head of each managed layer, by layer index.
        is_due: whether entries are rejected, or attention only recorded.
        length: true tokens read at the end of the pass.
    """

    cache: SequenceCache
    quotas: Mapping[int, int]
    is_due: bool
    length: int


class StepEviction:
    """Part of an observer that a kernel carries out at the end of a pass.

    Args:
        tokens: M, entries per kv head averaged over the managed layers.
    """

    def __init__(
        self, planner: Planner, rule: StepRule, tokens: int, segments: Sequence[SequenceStep]
    ) -> None:
        self._planner, self._rule, self._tokens, self._segments = planner, rule, tokens, segments

    @property
    def num_layers(self) -> int:
        """Number of layers that are evicted from, over all segments."""
        return sum(len(segment.quotas) for segment in self._segments)

    def run(self) -> set[tuple[int, int]]:
        """Evict behind a pass that went layer by layer, and return the layers that are done:
        (segment, layer).

        Segments of which the kernel cannot do a layer are left to plans.
        """
        done: set[tuple[int, int]] = set()
        for index, segment in enumerate(self._segments):
            layers = self._layers(segment)
            found = [] if layers is None else segment.cache.evict_step(layers, self._rule)
            done.update((index, layer) for layer in found)
        return done

    def by_layouts(self, layouts: Sequence[StepTables]) -> dict[int, SequenceEviction]:
        """Evictions behind a pass that went by layouts, by segment; without those that are left to
        plans.

        Args:
            layouts: of the cache of each segment.
        """
        from larder.cache.step_layout import SequenceEviction

        found: dict[int, SequenceEviction] = {}
        for index, (segment, layout) in enumerate(zip(self._segments, layouts, strict=True)):
            build = partial(self._table, segment)
            table = layout.eviction_table(self._planner, self._key(segment), build)
            if table is not None:
                found[index] = SequenceEviction(segment.cache, layout, table)
        return found

    def kept_by_layouts(self, layouts: Sequence[StepTables]) -> dict[int, SequenceEviction] | None:
        """Evictions of `by_layouts` whose tables are kept from an earlier step; None if one is not.

        Args:
            layouts: of the cache of each segment.
        """
        from larder.cache.step_layout import SequenceEviction

        found: dict[int, SequenceEviction] = {}
        for index, (segment, layout) in enumerate(zip(self._segments, layouts, strict=True)):
            table = layout.kept_eviction_table(self._planner, self._key(segment))
            if table is None:
                return None
            found[index] = SequenceEviction(segment.cache, layout, table)
        return found

    def _key(self, segment: SequenceStep) -> tuple[object, ...]:
        """Key of the table of a segment: state that it depends on beside its storage."""
        due = segment.quotas if segment.is_due else list(segment.quotas)
        return self._tokens, due

    def _table(self, segment: SequenceStep) -> EvictionTable | None:
        """Layers of a segment as a table; None if there is one that the kernel cannot do."""
        from larder.ops.cpu.decode_eviction import EvictionTable  # few policies evict so

        layers = self._layers(segment)
        if layers is None:
            return None
        spared = [segment.length - own.stop for own in layers.values()]
        return EvictionTable(list(layers.values()), self._rule, list(layers), spared)

    def _layers(self, segment: SequenceStep) -> dict[int, EvictionStorage] | None:
        """Layers of a segment, as the kernel takes them; None if there is one that it cannot do."""
        layers: dict[int, EvictionStorage] = {}
        for layer, quota in segment.quotas.items():
            store = segment.cache.layers[layer]
            own = store.eviction_storage(self._rule)
            if own is None:
                return None
            if not segment.is_due:
                layers[layer] = own
                continue
            kept = self._planner.budget.step_quota(store.ledger_scalars(), quota, self._tokens)
            if kept is None:
                return None
            ends = self._planner.protect.ends(kept.protected_by)
            first = max(ends.first, self._planner.watermark)
            stop = segment.length - ends.last
            layers[layer] = own._replace(count=kept.count, first=first, stop=stop)
        return layers
