"""Eviction pass: observer of a forward pass that scores layers, makes plans and applies them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.observation import LayerScores, Observation, Phase, ScratchPrompt
from larder.core.plan import LayerPlans, LayerQuotas, Plan
from larder.core.types import Packed
from larder.models.observers import LayerActivations, Observer
from larder.ops.rope import rerotate_per_head
from larder.policy.planner import Planner
from larder.prefill.memory import PeakMemoryMeter

if TYPE_CHECKING:  # only decode steps by plans collect them
    from larder.cache.batch_plan import BatchPlan


class ScoringPhase(Enum):
    """Purpose of a pass.

    OBSERVE: updates tallies, without scores.
    ACCUMULATE: adds to scores; plans follow a later pass.
    DECIDE: scores layers and makes plans.
    """

    OBSERVE = "watch"
    ACCUMULATE = "more"
    DECIDE = "last"


class EvictionMode(Enum):
    """Execution of plans: rejected entries are freed, or become free slots for new tokens."""

    APPLY = "apply"
    EVICT = "evict"


# Inputs of a pass by layer, then by the name of their provider.
LayerInputs = Mapping[int, Mapping[str, Tensor]]
# Called with the layer, its observation and the scores of a pass; None in a pass without scores.
ScoreListener = Callable[[int, Observation, Packed | None], None]


class EvictionPass:
    """Observer of the passes that lead to one set of plans; used once.

    Only one layer's queries are held at a time: layers that wait for a plan keep their scores only.
    Scores of several passes are combined by maximum.

    Args:
        caches: one per segment of the pass.
        tokens: M, entries per kv head averaged over the managed layers.
        quotas: capacity of each managed layer in entries per kv head, by layer index, one mapping
            per segment.
        meter: observes every change; None for no measurement, as in decode.
        lengths: true tokens read at the end of the pass, one per segment.
        phase: prefill or decode.
        starts: true positions of the first generated token, one per segment; unused in prefill.
        mode: how plans are carried out.
        listener: called with what each layer was scored by, before plans are applied.
        batch: collects the plans, which another part carries out; None to apply them at once.
    """

    def __init__(
        self,
        planner: Planner,
        caches: Sequence[SequenceCache],
        tokens: int,
        quotas: Sequence[LayerQuotas],
        meter: PeakMemoryMeter | None,
        lengths: Sequence[int],
        phase: Phase = Phase.PREFILL,
        starts: Sequence[int] = (),
        mode: EvictionMode = EvictionMode.APPLY,
        listener: ScoreListener | None = None,
        batch: BatchPlan | None = None,
    ) -> None:
        self.lengths = lengths
        self._planner = planner
        self._caches = caches
        self._tokens = tokens
        self._quotas = quotas
        self._meter = meter
        self._phase = phase
        self._starts = starts or [0] * len(caches)
        self._mode = mode
        self._listener, self._batch = listener, batch
        self._prompts: Sequence[ScratchPrompt] = ()
        self._phases: Sequence[ScoringPhase] = ()
        self._scratch_tokens = 0
        self._inputs: Sequence[LayerInputs] = ()
        self._input_bytes = 0
        self._scores: dict[tuple[int, int], Packed] = {}
        self._ready: list[dict[int, LayerScores]] = [{} for _ in caches]
        self._shared_scores = SharedLayerScores(planner.unit.layers_together)
        self._layer_indices = {layer: index for index, layer in enumerate(quotas[0])}

    def begin_pass(
        self,
        prompts: Sequence[ScratchPrompt],
        phases: Sequence[ScoringPhase],
        scratch_tokens: int,
        inputs: Sequence[LayerInputs] = (),
    ) -> None:
        """Set tokens and purpose of the next pass, one item per segment.

        Args:
            scratch_tokens: scratch tokens of all segments together; 0 in an appending pass.
            inputs: what passes of their own gave of each segment; empty where there are none.
        """
        self._inputs = inputs
        found = [tensor for each in inputs for layer in each.values() for tensor in layer.values()]
        self._input_bytes = sum(tensor.nbytes for tensor in found)
        self._prompts, self._phases, self._scratch_tokens = prompts, phases, scratch_tokens
        if scratch_tokens or not self._planner.sums_weights:
            return
        for cache, prompt, quotas in zip(self._caches, prompts, self._quotas, strict=True):
            if len(prompt.ids) > 1:
                cache.record_weight_sums(quotas)

    def __call__(self, index: int, layer: int, recorded: LayerActivations) -> None:
        if self._meter is not None:
            cache = self._caches[index]
            replaced = 0 if self._scratch_tokens else cache.layers[layer].replaced_bytes
            self._measure(layer, max(replaced, cache.layers[layer].attention_copy_bytes))
        is_observed = self._phases[index] is not ScoringPhase.OBSERVE or self._planner.has_tallies
        is_observed |= self._listener is not None
        if layer in self._quotas[index] and is_observed:
            self._apply(index, layer, self._plans(index, layer, recorded))

    def _plans(self, index: int, layer: int, recorded: LayerActivations) -> LayerPlans:
        """Plans for the layers that can be decided once this one is scored."""
        observation = self._observation(index, layer, recorded)
        if not self._scratch_tokens:
            observation = self._tally(index, layer, observation)
        if self._phases[index] is ScoringPhase.OBSERVE:
            self._notify(layer, observation, None)
            return {}
        score = partial(
            self._planner.score,
            quota=self._quotas[index][layer],
            tokens=self._tokens,
            start=self._starts[index],
        )
        own = self._shared_scores.scores(index, self._layer_indices[layer], observation, score)
        scores = self._combine(index, layer, own)
        self._notify(layer, observation, scores)
        if self._phases[index] is ScoringPhase.ACCUMULATE:
            self._scores[index, layer] = scores
            return {}
        cache, ready = self._caches[index], self._ready[index]
        if self._meter is not None:
            others = max((cache.layers[own].entries_copy_bytes for own in ready), default=0)
            self._measure(layer, cache.layers[layer].entries_copy_bytes + others)
        ready[layer] = self._planner.with_protection(
            observation, scores, self._tokens, self._starts[index]
        )
        entries = lambda own: observation.entries if own == layer else cache.entries(own)  # noqa: E731
        return self._planner.plan(ready, self._quotas[index], entries)

    def _notify(self, layer: int, observation: Observation, scores: Packed | None) -> None:
        if self._listener is not None:
            self._listener(layer, observation, scores)

    def _in_flight(self, layer: int) -> int:
        """Bytes of inputs, and of scratch keys and values in one layer, all segments together."""
        spec = self._caches[0].spec
        scratch = spec.layers[layer].bytes_per_token(spec.dtype) * self._scratch_tokens
        return scratch + self._input_bytes

    def _observation(self, index: int, layer: int, recorded: LayerActivations) -> Observation:
        cache, prompt = self._caches[index], self._prompts[index]
        if self._meter is not None:
            self._measure(layer, cache.layers[layer].entries_copy_bytes)
        observation = Observation(
            cache.spec.layers[layer],
            cache.entries(layer),
            recorded.queries,
            recorded.positions,
            self.lengths[index],
            prompt.span,
            self._ids_of(prompt, recorded, self.lengths[index]),
            self._phase,
            recorded.keys,
            cache.layers[layer].take_logits(),
            inputs={**recorded.inputs, **self._inputs_of(index, layer)},
            latest=cache.latest.queries(layer),
            watermark=self._planner.watermark,
            weight_sums=cache.layers[layer].take_weight_sums(),
        )
        num_new = 0 if self._scratch_tokens else len(recorded.positions)
        return self._planner.with_model_inputs(rotate_to_cache_positions(observation, num_new))

    def _inputs_of(self, index: int, layer: int) -> Mapping[str, Tensor]:
        return self._inputs[index].get(layer, {}) if self._inputs else {}

    def _ids_of(
        self, prompt: ScratchPrompt, recorded: LayerActivations, length: int
    ) -> tuple[int, ...]:
        """Token ids of the pass that reached the layer."""
        if len(recorded.positions) == len(prompt.ids):
            return prompt.ids
        start = length - len(prompt.ids)
        return tuple(prompt.ids[position - start] for position in recorded.positions.tolist())

    def _tally(self, index: int, layer: int, observation: Observation) -> Observation:
        """Update the ledger of a layer, and return the observation with its new columns."""
        self._caches[index].record_queries(layer, observation.queries, observation.query_positions)
        columns = self._planner.tally(observation)
        if not columns:
            return observation
        cache = self._caches[index]
        cache.write_columns(layer, columns)
        if not cache.layers[layer].entries_copy_bytes:
            return observation
        return replace(observation, entries=observation.entries.with_columns(columns))

    def _combine(self, index: int, layer: int, scores: Packed) -> Packed:
        earlier = self._scores.pop((index, layer), None)
        return scores if earlier is None else torch.maximum(scores, earlier)

    def _apply(self, index: int, current: int, plans: Mapping[int, Plan]) -> None:
        cache, ready = self._caches[index], self._ready[index]
        for layer, plan in cache.fit_plans(plans).items():
            scored = ready.pop(layer)
            if self._planner.budget.replans:
                ready[layer] = scored.after_plan(plan)
            if self._batch is not None:
                self._batch.add(cache, layer, plan)
            elif self._mode is EvictionMode.APPLY:
                cache.apply(layer, plan)
            else:
                cache.evict(layer, plan)
            if self._meter is not None:
                self._measure(current, cache.layers[layer].replaced_bytes)

    def _measure(self, layer: int, passing_bytes: int) -> None:
        """Measure temporary bytes of a layer, scratch keys and values included."""
        if self._meter is not None:
            self._meter.observe(self._caches, self._in_flight(layer) + passing_bytes)


@dataclass(frozen=True)
class LeaderScores:
    """Scores of a group's first layer, and the positions of its entries."""

    scores: Packed
    positions: Int[Tensor, " T"]
    lengths: tuple[int, ...]

    def fits(self, observation: Observation) -> bool:
        """True if the heads of another layer hold the same positions."""
        entries = observation.entries
        if entries.lengths != self.lengths:
            return False
        positions = entries.packed_positions()
        return torch.equal(positions, self.positions.to(positions.device))


class SharedLayerScores:
    """Scores shared by groups of consecutive layers: those of the first layer, once per pass.

    A layer whose heads hold other positions than the first is scored separately.

    Args:
        together: managed layers in a group; 1 shares nothing.
    """

    def __init__(self, together: int) -> None:
        self._together = together
        self._leads: dict[int, LeaderScores] = {}

    def scores(
        self,
        segment: int,
        index: int,
        observation: Observation,
        score: Callable[[Observation], Packed],
    ) -> Packed:
        """Scores of a layer.

        Args:
            segment: number of the segment in the pass.
            index: index among the managed layers, from 0.
            score: computes the scores of a layer.
        """
        if self._together == 1:
            return score(observation)
        if index % self._together and self._leads[segment].fits(observation):
            return self._leads[segment].scores.to(observation.entries.positions.device)
        scores = score(observation)
        if index % self._together == 0:
            positions = observation.entries.packed_positions()
            self._leads[segment] = LeaderScores(scores, positions, observation.entries.lengths)
        return scores


def joined_inputs(
    first: Sequence[LayerInputs], second: Sequence[LayerInputs]
) -> Sequence[LayerInputs]:
    """Inputs of each segment that two passes gave; either may be empty."""
    if not first or not second:
        return first or second
    return [
        {layer: {**own.get(layer, {}), **more.get(layer, {})} for layer in {**own, **more}}
        for own, more in zip(first, second, strict=True)
    ]


def rotate_to_cache_positions(observation: Observation, num_new: int) -> Observation:
    """Observation with queries and keys rotated to cache positions, behind the layer's entries.

    An offset from right behind the text is kept in cache positions. Without a compact layer, the
    observation does not change.

    Args:
        own: number of entries of each head that are the queries' own tokens.
    """
    true, radians = observation.query_positions, observation.layer.radians
    if radians is None or not len(observation.entries.rope_positions):
        return observation
    shift = true[0] - (observation.length - num_new)
    lengths = torch.tensor(observation.entries.lengths, device=true.device)
    first = (lengths - num_new + shift).clamp(min=0)
    compacted = first[:, None] + true - true[0]
    frequencies = torch.tensor(radians, device=true.device)
    return replace(
        observation,
        queries=rerotate_per_head(observation.queries, true, compacted, frequencies),
        keys=rerotate_per_head(observation.keys, true, compacted, frequencies),
        rope_positions=compacted,
    )


def token_observer(
    observer: Observer,
    caches: Sequence[SequenceCache],
    layers: Sequence[int],
    numbers: Sequence[Mapping[str, Float[Tensor, " _"]]],
) -> Observer:
    """Observer that records numbers of new tokens before it calls another observer.

    Args:
        layers: layers with the columns.
        numbers: of the tokens about to be read, by column; one mapping per segment.
    """
    starts = [cache.next_position for cache in caches]

    def observe(index: int, layer: int, recorded: LayerActivations) -> None:
        if layer in layers:
            caches[index].write_token_columns(layer, numbers[index], starts[index])
        observer(index, layer, recorded)

    return observe
