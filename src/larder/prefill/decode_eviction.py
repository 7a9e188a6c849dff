"""Keeps caches within their budget while text is generated over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.ledger import SURPRISE
from larder.core.observation import Phase, ScratchPrompt
from larder.models.forward_batch import BatchSegment, LayerActivations, Observer
from larder.policy.planner import Planner
from larder.prefill.eviction_pass import EvictionMode, EvictionPass, ScoringPhase, surprise_observer

# How surprising the tokens of rows are, one tensor per row, before they are read.
SurpriseForecast = Callable[[Sequence[BatchSegment]], Sequence[Float[Tensor, " _"]]]


def no_surprise(rows: Sequence[BatchSegment]) -> Sequence[Float[Tensor, " _"]]:
    """For policies that do not ask how surprising anything is."""
    del rows
    return ()


@dataclass(frozen=True)
class DecodeEviction:
    """A policy at work on sequences that grow token by token.

    Every pass that appends goes by under the eyes of an observer that it hands out: tallies go on,
    and where a cache is over its quota by more than the policy's timing allows, entries go: layer
    by layer where texts are read, or where a look at a layer copies it; after the last layer where
    a single token is.

    Args:
        tokens: M, entries per kv head averaged over the managed layers.
        quotas: the same per managed layer, by layer index, for each cache of the generation.
        starts: true positions where generating began, one per cache of the generation.
        pages: as in `Reader`.
        foresee: a decoder's, asked where the policy wants to know.
        max_excess: entries per kv head that may pile up at most, whatever the timing allows; None
            leaves it to the timing.
    """

    planner: Planner
    tokens: int
    quotas: tuple[Mapping[int, int], ...]
    starts: tuple[int, ...]
    forecast: SurpriseForecast = no_surprise
    recall_entries: int = 0
    max_excess: int | None = None

    def at_turn_end(self) -> DecodeEviction:
        """The same at the end of a turn, when nothing may be held beyond the budget."""
        return replace(self, max_excess=0)

    def observer(
        self, numbers: Sequence[int], rows: Sequence[BatchSegment], steps: Sequence[int]
    ) -> Observer:
        """Watches one pass.

        Args:
            numbers: which of the caches the rows are.
            steps: tokens generated so far, one per row.
        """
        caches = [row.cache for row in rows]
        lengths = [row.cache.next_position + len(row.ids) for row in rows]
        pairs = zip(numbers, steps, strict=True)
        quotas = [self._quotas(number, step) for number, step in pairs]
        judge = EvictionPass(
            self.planner,
            caches,
            self.tokens,
            quotas,
            None,
            lengths,
            Phase.DECODE,
            [self.starts[number] for number in numbers],
            EvictionMode.EVICT,
        )
        due = [self._is_due(row, own) for row, own in zip(rows, quotas, strict=True)]
        turns = [ScoringPhase.DECIDE if is_due else ScoringPhase.OBSERVE for is_due in due]
        for row, own, is_due in zip(rows, quotas, due, strict=True):
            if len(row.ids) == 1 and self.planner.needs_logits(is_due):
                row.cache.record_logits(own)
        asked = [ScratchPrompt(r.ids, (0, n)) for r, n in zip(rows, lengths, strict=True)]
        judge.begin_pass(asked, turns, 0)
        watching: Observer = judge
        if SURPRISE in self.planner.ledger.columns:
            watching = surprise_observer(judge, caches, list(self.quotas[0]), self.forecast(rows))
        if max(len(row.ids) for row in rows) > 1 or self._copies(caches):
            return watching
        return DeferredObserver(watching, len(rows) * len(caches[0].spec.layers))

    def _copies(self, caches: Sequence[SequenceCache]) -> bool:
        """Whether what is kept of a layer for a look at it is more than a few numbers."""
        return any(cache.entries_copy_bytes(layer) for cache in caches for layer in self.quotas[0])

    def _quotas(self, number: int, step: int) -> dict[int, int]:
        timing, quotas = self.planner.timing, self.quotas[number]
        return {layer: timing.quota(q, self.tokens, step) for layer, q in quotas.items()}

    def _is_due(self, row: BatchSegment, quotas: Mapping[int, int]) -> bool:
        """Whether more will be held than may be, once the row is read."""
        excess = self.planner.timing.excess()
        if excess is None:
            return False
        if self.max_excess is not None:
            excess = min(excess, self.max_excess)
        lengths, new = row.cache.lengths(), len(row.ids)
        if not any(tier.has_offloaded for tier in row.cache.tiers):
            excess += self.recall_entries
        held = {layer: sum(lengths[layer]) + new * len(lengths[layer]) for layer in quotas}
        allowed = {layer: (quota + excess) * len(lengths[layer]) for layer, quota in quotas.items()}
        return self.planner.budget.is_plan_due(held, allowed) or self._is_rounding_due(
            row, quotas, excess
        )

    def _is_rounding_due(self, row: BatchSegment, quotas: Mapping[int, int], excess: int) -> bool:
        """Whether more will be held at full precision than may be."""
        storage, spec = self.planner.storage, row.cache.spec
        if not storage.codecs:
            return False
        finest, itemsize = row.cache.full_precision_lengths(), spec.dtype.itemsize
        room = {
            i: storage.full_precision_entries(q, spec.layers[i], itemsize)
            for i, q in quotas.items()
        }
        return any(
            sum(finest[layer]) > (room[layer] + excess - len(row.ids)) * len(finest[layer])
            for layer in quotas
        )


class DeferredObserver:
    """Holds what a pass of single tokens made of each layer until its last layer has gone by.

    What judges a layer in the middle of a pass finds its code and small tensors gone from the
    processor's caches, for the weights of the model went through them. Done for all layers at the
    end, the work of H2O took a quarter less time. For that, queries and what caches heard of them
    are held for every layer: of single tokens, less than a hundredth of the entries they look at.
    A pass that fails halfway has changed nothing yet. Used once.

    Args:
        observer: told everything in the order in which it happened.
        calls: how many there will be: one per layer and row.
    """

    def __init__(self, observer: Observer, calls: int) -> None:
        self._observer = observer
        self._calls = calls
        self._held: list[tuple[int, int, LayerActivations]] = []

    def __call__(self, row: int, layer: int, recorded: LayerActivations) -> None:
        self._held.append((row, layer, recorded))
        if len(self._held) == self._calls:
            held, self._held = self._held, []
            for told in held:
                self._observer(*told)
