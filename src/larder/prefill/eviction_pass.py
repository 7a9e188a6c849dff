"""Watches a pass, scores every layer as it goes by, and carries plans out as soon as they stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.ledger import SURPRISE
from larder.core.observation import LayerScores, Observation, Phase, ScratchPrompt
from larder.core.plan import Plan
from larder.core.types import Packed
from larder.models.forward_batch import LayerActivations, Observer
from larder.ops.rope import rerotate_per_head
from larder.policy.planner import Planner
from larder.prefill.memory import PeakMemoryMeter


class ScoringPhase(Enum):
    """What a pass is for.

    OBSERVE: nothing is judged; tallies go on.
    ACCUMULATE: more passes will add to the scores before anything is decided.
    DECIDE: plans are made.
    """

    OBSERVE = "watch"
    ACCUMULATE = "more"
    DECIDE = "last"


class EvictionMode(Enum):
    """How plans are carried out: what they reject is freed, or becomes room for new tokens."""

    APPLY = "apply"
    EVICT = "evict"


class EvictionPass:
    """An observer for one settlement; used once.

    Only one layer's queries are held at a time: layers that wait for a plan leave their scores.
    Scores of several passes are joined by maximum.

    Args:
        caches: one per row of the pass.
        quotas: entries per kv head of each managed layer, by layer index, one mapping per row.
        meter: told of every change; None where nobody asks, as while generating.
        lengths: true tokens read when the judged tokens are in, one per row.
        stage: whether a context is read or text generated.
        starts: true positions where generating began, one per row; unused while reading.
    """

    def __init__(
        self,
        planner: Planner,
        caches: Sequence[SequenceCache],
        tokens: int,
        quotas: Sequence[Mapping[int, int]],
        meter: PeakMemoryMeter | None,
        lengths: Sequence[int],
        stage: Phase = Phase.PREFILL,
        starts: Sequence[int] = (),
        carry: EvictionMode = EvictionMode.APPLY,
    ) -> None:
        self.lengths = lengths
        self._planner = planner
        self._caches = caches
        self._tokens = tokens
        self._quotas = quotas
        self._meter = meter
        self._stage = stage
        self._starts = starts or [0] * len(caches)
        self._carry = carry
        self._asked: Sequence[ScratchPrompt] = ()
        self._turns: Sequence[ScoringPhase] = ()
        self._scratch_tokens = 0
        self._scores: dict[tuple[int, int], Packed] = {}
        self._ready: list[dict[int, LayerScores]] = [{} for _ in caches]
        self._leading = SharedLayerScores(planner.unit.layers_together)
        self._places = {layer: place for place, layer in enumerate(quotas[0])}

    def begin_pass(
        self, asked: Sequence[ScratchPrompt], turns: Sequence[ScoringPhase], scratch_tokens: int
    ) -> None:
        """Say what the next pass reads and is for, one entry per row.

        Args:
            scratch_tokens: read behind the caches by all rows together; 0 where all is appended.
        """
        self._asked, self._turns, self._scratch_tokens = asked, turns, scratch_tokens

    def __call__(self, row: int, layer: int, recorded: LayerActivations) -> None:
        if self._meter is not None:
            cache = self._caches[row]
            replaced = 0 if self._scratch_tokens else cache.replaced_bytes(layer)
            self._note(layer, max(replaced, cache.attention_copy_bytes(layer)))
        is_watched = self._turns[row] is not ScoringPhase.OBSERVE or self._planner.has_tallies
        if layer in self._quotas[row] and is_watched:
            self._carry_out(row, layer, self._plans(row, layer, recorded))

    def _plans(self, row: int, layer: int, recorded: LayerActivations) -> dict[int, Plan]:
        """For those layers that can be decided once this one was looked at, a single time."""
        seen = self._look(row, layer, recorded)
        if not self._scratch_tokens:
            seen = self._tally(row, layer, seen)
        if self._turns[row] is ScoringPhase.OBSERVE:
            return {}
        told = self._quotas[row][layer], self._tokens, self._starts[row]
        score: Callable[[Observation], Packed] = lambda seen: self._planner.score(seen, *told)  # noqa: E731
        own = self._leading.scores(row, self._places[layer], seen, score)
        scores = self._join(row, layer, own)
        if self._turns[row] is ScoringPhase.ACCUMULATE:
            self._scores[row, layer] = scores
            return {}
        cache, ready = self._caches[row], self._ready[row]
        if self._meter is not None:
            others = max((cache.entries_copy_bytes(index) for index in ready), default=0)
            self._note(layer, cache.entries_copy_bytes(layer) + others)
        ready[layer] = self._planner.with_protection(seen, scores, self._tokens, self._starts[row])
        held = lambda index: seen.entries if index == layer else cache.entries(index)  # noqa: E731
        return self._planner.plan(ready, self._quotas[row], held)

    def _in_flight(self, layer: int) -> int:
        """Bytes of a scratch pass's own keys and values in one layer, all rows together."""
        spec = self._caches[0].spec
        return spec.layers[layer].bytes_per_token(spec.dtype) * self._scratch_tokens

    def _look(self, row: int, layer: int, recorded: LayerActivations) -> Observation:
        cache, asked = self._caches[row], self._asked[row]
        if self._meter is not None:
            self._note(layer, cache.entries_copy_bytes(layer))
        seen = Observation(
            cache.spec.layers[layer],
            cache.entries(layer),
            recorded.queries,
            recorded.positions,
            self.lengths[row],
            asked.span,
            asked.ids,
            self._stage,
            recorded.keys,
            cache.heard(layer),
            states=recorded.states,
            latest=cache.latest.queries(layer),
        )
        own = 0 if self._scratch_tokens else len(recorded.positions)
        return self._planner.with_model_facts(rotate_to_cache_positions(seen, own))

    def _tally(self, row: int, layer: int, seen: Observation) -> Observation:
        """Bring what is remembered of a layer up to date before anything looks at its columns."""
        if self._planner.queries:
            self._caches[row].remember(layer, seen.queries, seen.query_positions)
        columns = self._planner.tally(seen)
        if not columns:
            return seen
        cache = self._caches[row]
        cache.note(layer, columns)
        if not cache.entries_copy_bytes(layer):
            return seen
        return replace(seen, entries=seen.entries.with_columns(columns))

    def _join(self, row: int, layer: int, scores: Packed) -> Packed:
        earlier = self._scores.pop((row, layer), None)
        return scores if earlier is None else torch.maximum(scores, earlier)

    def _carry_out(self, row: int, current: int, plans: Mapping[int, Plan]) -> None:
        cache, ready = self._caches[row], self._ready[row]
        for layer, plan in plans.items():
            judged = ready.pop(layer)
            if self._planner.budget.replans:
                ready[layer] = judged.after_plan(plan)
            if self._carry is EvictionMode.APPLY:
                cache.apply(layer, plan)
            else:
                cache.evict(layer, plan)
            if self._meter is not None:
                self._note(current, cache.replaced_bytes(layer))

    def _note(self, layer: int, passing_bytes: int) -> None:
        """Tell the meter what is held for a moment, beside a scratch pass's own in that layer."""
        if self._meter is not None:
            self._meter.observe(self._caches, self._in_flight(layer) + passing_bytes)


@dataclass(frozen=True)
class LeaderScores:
    """The scores of a layer, and where the entries stood that they are of."""

    scores: Packed
    positions: Int[Tensor, " T"]
    lengths: tuple[int, ...]

    def fits(self, seen: Observation) -> bool:
        """Whether another layer's heads hold the same positions."""
        entries = seen.entries
        if entries.lengths != self.lengths:
            return False
        return torch.equal(entries.packed_positions(), self.positions)


class SharedLayerScores:
    """Scores layers in groups: the first of each group leads, once per pass.

    A layer whose heads do not hold what the leader's held is scored by itself.

    Args:
        together: managed layers in a group; 1 leaves every layer to itself.
    """

    def __init__(self, together: int) -> None:
        self._together = together
        self._leads: dict[int, LeaderScores] = {}

    def scores(
        self, row: int, place: int, seen: Observation, score: Callable[[Observation], Packed]
    ) -> Packed:
        """The scores of a layer.

        Args:
            row: which of the caches of a pass.
            place: which of the managed layers, from 0.
            score: scores a layer by itself.
        """
        if self._together == 1:
            return score(seen)
        if place % self._together and self._leads[row].fits(seen):
            return self._leads[row].scores
        scores = score(seen)
        if place % self._together == 0:
            positions = seen.entries.packed_positions()
            self._leads[row] = LeaderScores(scores, positions, seen.entries.lengths)
        return scores


def rotate_to_cache_positions(seen: Observation, own: int) -> Observation:
    """The same, with queries and keys turned to the places that follow the layer's entries.

    What stands later than right behind the text, or earlier, does so in its places too.

    Args:
        own: how many of the entries of each head are the queries' own tokens.
    """
    true, radians = seen.query_positions, seen.layer.radians
    if radians is None or not len(seen.entries.rope_positions):
        return seen
    shift = true[0] - (seen.length - own)
    lengths = torch.tensor(seen.entries.lengths, device=true.device)
    first = (lengths - own + shift).clamp(min=0)
    places = first[:, None] + true - true[0]
    turning = torch.tensor(radians, device=true.device)
    return replace(
        seen,
        queries=rerotate_per_head(seen.queries, true, places, turning),
        keys=rerotate_per_head(seen.keys, true, places, turning),
        rope_positions=places,
    )


def record_surprise(
    cache: SequenceCache, layer: int, start: int, surprises: Float[Tensor, " _"]
) -> None:
    """Write it into the entries of one layer.

    Args:
        start: true position of the first token that `surprises` speaks of.
    """
    entries = cache.entries(layer)
    places = entries.positions.long() - start
    is_new = (places >= 0) & (places < len(surprises))
    fresh = surprises[places.clamp(0, len(surprises) - 1)]
    cache.note(layer, {SURPRISE: torch.where(is_new, fresh, entries.columns[SURPRISE])})


def surprise_observer(
    observer: Observer,
    caches: Sequence[SequenceCache],
    layers: Sequence[int],
    surprises: Sequence[Float[Tensor, " _"]],
) -> Observer:
    """An observer that knows of each layer's new entries how surprising they are.

    Args:
        layers: those that remember it.
        surprises: of the tokens that are about to be read, one tensor per row.
    """
    starts = [cache.next_position for cache in caches]

    def watch(row: int, layer: int, recorded: LayerActivations) -> None:
        if layer in layers:
            record_surprise(caches[row], layer, starts[row], surprises[row])
        observer(row, layer, recorded)

    return watch
