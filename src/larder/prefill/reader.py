"""Prefill reader: reads a block into caches and evicts, the step that all schedules share.

Learned tokens may be read behind a text before it is evicted from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from jaxtyping import Int64
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.errors import ScoreError, UsageError
from larder.core.images import NO_IMAGES, ImageSpans
from larder.core.observation import Prompts, ScratchPrompt
from larder.core.spelling import spell
from larder.core.types import AppendKind, Mode, TokenIds
from larder.models.batch_segment import BatchSegment
from larder.models.decoder import Decoder
from larder.models.observers import LayerActivations, Observer
from larder.policy.planner import Planner
from larder.policy.providers.base import DraftProvider, SoftEntryProvider, select_providers
from larder.policy.scorers.base import Scorer
from larder.prefill.eviction_pass import (
    EvictionPass,
    LayerInputs,
    ScoreListener,
    ScoringPhase,
    joined_inputs,
)
from larder.prefill.memory import EntryCapacity, PeakMemoryMeter

if TYPE_CHECKING:
    from larder.models.token_selection import ChooseTokens

# Latest tokens that are read again where token providers (such as surprise) need a whole pass.
REREAD_TOKENS = 32
PLACEHOLDER = 0  # token whose embedding a learned vector replaces


def _keep_in_place(cache: SequenceCache) -> None:
    """Null finish callback: the cache stays in place."""
    del cache


@dataclass(frozen=True)
class PrefillSequence:
    """Sequence in prefill: a cache being built.

    Args:
        prompts: scratch prompts by name.
        finish: takes over the finished cache.
        images: images in the text, as spans of true positions.
        turn_ends: true positions at which turns of a conversation end.
    """

    cache: SequenceCache
    prompts: Prompts
    finish: Callable[[SequenceCache], None] = _keep_in_place
    images: ImageSpans = NO_IMAGES
    turn_ends: tuple[int, ...] = ()


PrefillGroup = Sequence[PrefillSequence]  # read together


@dataclass(frozen=True)
class PrefillReader:
    """Model, policy and budget of a prefill.

    Args:
        tokens: M, entries per kv head averaged over the managed layers.
        quotas: capacity per managed layer, by layer index.
        recall_entries: entries per kv head reserved for recalled pages and for added entries, once
            anything is rejected.
        bound: capacity of a cache between turns; None where nothing is ever evicted.
    """

    decoder: Decoder
    planner: Planner
    tokens: int
    quotas: Mapping[int, int]
    meter: PeakMemoryMeter
    recall_entries: int = 0
    bound: EntryCapacity | None = None

    def append(self, sequences: PrefillGroup, ids: TokenIds) -> None:
        """Read tokens into every sequence without scoring."""
        segments, observer = self._appending(sequences, ids)
        inputs, providers = self.planner.activation_providers, self.planner.token_providers
        if not providers:
            self.decoder.read(segments, Mode.APPEND, observer, inputs)
            return
        start = sequences[0].cache.next_position
        columns = self.decoder.forward_token_numbers(
            segments, Mode.APPEND, providers, observer, inputs
        )
        for segment, by_name in zip(segments, columns, strict=True):
            for layer in self.quotas:
                segment.cache.write_token_columns(layer, by_name, start)

    def read_and_evict_steps(
        self, sequences: PrefillGroup, ids: TokenIds, block: TokenIds, start: int
    ) -> Iterator[None]:
        """Read tokens into every sequence, then bring each cache back within its budget.

        Pauses before every further pass.

        Args:
            ids: tokens still to be read.
            block: tokens to score by; `ids` are its last ones.
            start: true position of the first token of `block`.
        """
        if self._fits(sequences, len(ids)):
            self.append(sequences, ids)
            return
        scratches = [self._scratches(sequence, block, start) for sequence in sequences]
        caches = [sequence.cache for sequence in sequences]
        length = start + len(block)
        eviction = self._eviction_pass(caches, length)
        if not scratches[0]:
            eviction.begin_pass(
                [ScratchPrompt(ids, (0, length))] * len(sequences),
                [ScoringPhase.DECIDE] * len(sequences),
                0,
            )
            inputs = self.planner.activation_providers
            self.decoder.read(_segments(sequences, ids), Mode.APPEND, eviction, inputs)
            return
        following = list[int]()
        has_drafts = any(scratch.drafts for scratch in scratches[0])
        if has_drafts:
            segments, observer = self._appending(sequences, ids)
            following = next_tokens(self.decoder, self._drafts, segments, Mode.APPEND, observer)
        else:
            self.append(sequences, ids)
        yield from self._scratch_steps(eviction, caches, scratches, following)

    def read_narrowing_steps(
        self,
        sequence: PrefillSequence,
        ids: TokenIds,
        choose: ChooseTokens,
        listener: ScoreListener | None,
    ) -> Iterator[None]:
        """Read a text in one pass in which chosen tokens alone go deeper, then bring the cache
        within its budget.

        Args:
            choose: tokens that go into each layer.
            listener: called with what a managed layer was scored by, before the next one is read.
        """
        from larder.models.token_selection import read_narrowing  # few policies narrow

        start = sequence.cache.next_position
        scratches = self._scratches(sequence, ids, start)
        length = start + len(ids)
        eviction = self._eviction_pass([sequence.cache], length, listener)
        phase = ScoringPhase.OBSERVE if scratches else ScoringPhase.DECIDE
        span = (0, 0) if scratches else (0, length)
        eviction.begin_pass([ScratchPrompt(ids, span)], [phase], 0)
        (segment,) = _segments((sequence,), ids)
        read_narrowing(self.decoder, segment, eviction, choose, self.planner.activation_providers)
        if scratches:
            scoring = self._eviction_pass([sequence.cache], length)
            yield from self._scratch_steps(scoring, [sequence.cache], [scratches], [])

    def append_chosen(self, sequence: PrefillSequence, ids: TokenIds, choose: ChooseTokens) -> None:
        """Read a text, of which chosen tokens alone go into some layers, without scoring."""
        from larder.models.token_selection import read_narrowing  # few policies narrow

        (segment,), observer = self._appending((sequence,), ids)
        read_narrowing(self.decoder, segment, observer, choose, self.planner.activation_providers)

    def read_chosen_steps(
        self, sequence: PrefillSequence, ids: TokenIds, rows: Int64[Tensor, " N"]
    ) -> Iterator[None]:
        """Read chosen tokens of a text, then bring the cache within its budget.

        Args:
            rows: their ascending indices, the last token among them.
        """
        choose: ChooseTokens = lambda layer, _: None if layer else rows  # noqa: E731
        if self._holds(max(map(max, sequence.cache.lengths())) + len(rows)):
            self.append_chosen(sequence, ids, choose)
        else:
            yield from self.read_narrowing_steps(sequence, ids, choose, None)

    def score_steps(
        self,
        sequence: PrefillSequence,
        ids: TokenIds,
        block: TokenIds,
        choose: ChooseTokens,
        listener: ScoreListener,
        scorer: Scorer,
    ) -> Iterator[None]:
        """Read tokens and score those of a block, without a plan.

        Args:
            block: tokens to score; `ids` are its last ones.
            choose: tokens that go into each layer.
            listener: called with what each managed layer was scored by; at the end, by all prompts.
            scorer: names the scratch prompts that are read behind the text.
        """
        from larder.models.token_selection import read_narrowing  # few policies narrow

        length = sequence.cache.next_position + len(ids)
        start, inputs = length - len(block), self.planner.activation_providers
        scratches = scorer.scratch(block, start, sequence.prompts)
        eviction = self._eviction_pass([sequence.cache], length, None if scratches else listener)
        phase = ScoringPhase.OBSERVE if scratches else ScoringPhase.ACCUMULATE
        eviction.begin_pass([ScratchPrompt(ids, (0, length))], [phase], 0)
        (segment,) = _segments((sequence,), ids)
        read_narrowing(self.decoder, segment, eviction, choose, inputs)
        scoring = self._eviction_pass([sequence.cache], length, listener)
        for each in scratches:
            yield
            phases, slopes = [ScoringPhase.ACCUMULATE], self._gradients([sequence.cache], [each])
            scoring.begin_pass([each], phases, each.tokens, slopes)
            prompt = BatchSegment(sequence.cache, each.ids, shift=each.shift)
            self._read_scratch([prompt], scoring)

    def _scratch_steps(
        self,
        eviction: EvictionPass,
        caches: Sequence[SequenceCache],
        scratches: Sequence[tuple[ScratchPrompt, ...]],
        following: Sequence[int],
    ) -> Iterator[None]:
        """Scratch passes behind the caches, the last of which makes plans.

        Args:
            scratches: scratch prompts of each cache.
            following: drafted token right behind each cache; empty without drafts.
        """
        rounds = list(zip(*scratches, strict=True))
        for number, prompts in enumerate(rounds, start=1):
            yield
            phase = ScoringPhase.DECIDE if number == len(rounds) else ScoringPhase.ACCUMULATE
            drafted = list(prompts)
            if following:
                drafted = with_drafts(self.decoder, self._drafts, caches, prompts, following)
            scratch_tokens = sum(scratch.tokens for scratch in drafted)
            inputs = self._gradients(caches, drafted)
            if phase is ScoringPhase.DECIDE and self.planner.soft_entry_providers:
                inputs = joined_inputs(
                    inputs, soft_entries(self.decoder, caches, self.planner.soft_entry_providers)
                )
            eviction.begin_pass(drafted, [phase] * len(drafted), scratch_tokens, inputs)
            pairs = zip(caches, drafted, strict=True)
            segments = [BatchSegment(cache, each.ids, shift=each.shift) for cache, each in pairs]
            self._read_scratch(segments, eviction)

    def _read_scratch(self, segments: Sequence[BatchSegment], observer: EvictionPass) -> None:
        """Read scratch prompts, of learned tokens where the policy names any."""
        with ExitStack() as contexts:
            for name, provider in self.planner.soft_prompt_providers.items():
                contexts.enter_context(self.decoder.soft_prompts.soft_pass(name, provider))
            self.decoder.read(segments, Mode.SCRATCH, observer, self.planner.activation_providers)

    def _gradients(
        self, caches: Sequence[SequenceCache], prompts: Sequence[ScratchPrompt]
    ) -> list[LayerInputs]:
        """Values of gradient providers for each scratch prompt; empty where there are none."""
        providers = self.planner.gradient_providers
        if not providers:
            return []
        from larder.prefill.gradients import gradient_inputs  # few policies take gradients

        pairs = zip(caches, prompts, strict=True)
        return [gradient_inputs(self.decoder, *pair, providers) for pair in pairs]

    def finish(self, sequence: PrefillSequence, waiting: PrefillGroup = ()) -> None:
        """Finish a sequence: free the slack of its cache and pass the cache on.

        Args:
            waiting: sequences of the same group that are finished later.
        """
        # Compacting goes layer by layer and holds one layer twice.
        caches = [sequence.cache, *(each.cache for each in waiting)]
        self.meter.observe(caches, sequence.cache.largest_layer_bytes)
        sequence.cache.compact()
        self.meter.add_finished(sequence.cache)
        sequence.finish(sequence.cache)

    def _appending(
        self, sequences: PrefillGroup, ids: TokenIds
    ) -> tuple[list[BatchSegment], EvictionPass]:
        """Segments of an appending pass, and an observer that only updates tallies."""
        caches = [sequence.cache for sequence in sequences]
        observer = self._eviction_pass(caches, sequences[0].cache.next_position + len(ids))
        observer.begin_pass(
            [ScratchPrompt(ids, (0, 0))] * len(sequences),
            [ScoringPhase.OBSERVE] * len(sequences),
            0,
        )
        return _segments(sequences, ids), observer

    def _scratches(
        self, sequence: PrefillSequence, block: TokenIds, start: int
    ) -> tuple[ScratchPrompt, ...]:
        """Scratch prompts of a sequence.

        What token providers make of logits is known only after a pass, when all layers are done, so
        scorers that read it get a second pass over the latest tokens.
        """
        scratches = self.planner.scorer.scratch(block, start, sequence.prompts)
        if scratches or not self.planner.token_providers:
            return scratches
        return (ScratchPrompt(block[-REREAD_TOKENS:], (0, start + len(block))),)

    @cached_property
    def _drafts(self) -> DraftProvider:
        """Provider of the drafts that scratch prompts ask for.

        Raises:
            ScoreError: the policy names none, or several.
        """
        named = select_providers(self.planner.providers, DraftProvider)
        if len(named) != 1:
            raise ScoreError(
                f"{spell(self.planner.scorer)} drafts tokens by {len(named)} providers of drafts: "
                'name one in its `needs`, such as "drafts".'
            )
        return next(iter(named.values()))

    def _eviction_pass(
        self, caches: Sequence[SequenceCache], length: int, listener: ScoreListener | None = None
    ) -> EvictionPass:
        lengths, quotas = [length] * len(caches), [self.quotas] * len(caches)
        return EvictionPass(
            self.planner, caches, self.tokens, quotas, self.meter, lengths, listener=listener
        )

    def _fits(self, sequences: PrefillGroup, new_tokens: int) -> bool:
        """True if every layer of every sequence stays within its budget without a plan.

        A cache that has kept everything has offloaded nothing, and needs no recall slots.
        """
        return self._holds(max(sequence.cache.next_position for sequence in sequences) + new_tokens)

    def _holds(self, longest: int) -> bool:
        """True if `longest` entries per kv head are within the budget of every layer."""
        if self.planner.budget.cuts_within_size:
            return False
        spec, finest = self.decoder.spec, self.planner.storage.full_precision_entries
        return all(
            longest <= finest(quota, spec.layers[index], spec.dtype.itemsize) + self.recall_entries
            for index, quota in self.quotas.items()
        )


def _segments(sequences: PrefillGroup, ids: TokenIds) -> list[BatchSegment]:
    """Segments with the same text for every sequence."""
    segments = list[BatchSegment]()
    for sequence in sequences:
        start = sequence.cache.next_position
        images = sequence.images.within(start, start + len(ids))
        segments.append(
            BatchSegment(sequence.cache, ids, append_kind=AppendKind.TEXT, images=images)
        )
    return segments


def next_tokens(
    decoder: Decoder,
    drafts: DraftProvider,
    segments: Sequence[BatchSegment],
    mode: Mode,
    observer: Observer | None = None,
) -> list[int]:
    """Read segments; returns the drafted next token of each."""
    ends = [total - 1 for total in accumulate(len(segment.ids) for segment in segments)]
    return drafts.next_tokens(decoder.forward_logits(segments, mode, ends, observer))


def with_drafts(
    decoder: Decoder,
    drafts: DraftProvider,
    caches: Sequence[SequenceCache],
    prompts: Sequence[ScratchPrompt],
    following: Sequence[int],
) -> list[ScratchPrompt]:
    """Scratch prompts extended by their drafts, equally many for each.

    The caches do not change, so the draft is read again for each added token.

    Args:
        following: drafted token right behind each cache, for prompts without tokens.
    """
    for _ in range(prompts[0].drafts):
        tokens = following
        if prompts[0].ids:
            pairs = zip(caches, prompts, strict=True)
            segments = [BatchSegment(cache, each.ids, shift=each.shift) for cache, each in pairs]
            tokens = next_tokens(decoder, drafts, segments, Mode.SCRATCH)
        longer = [(*each.ids, token) for each, token in zip(prompts, tokens, strict=True)]
        pairs = zip(prompts, longer, strict=True)
        prompts = [replace(each, ids=ids, drafts=each.drafts - 1) for each, ids in pairs]
    return list(prompts)


def soft_entries(
    decoder: Decoder, caches: Sequence[SequenceCache], providers: Mapping[str, SoftEntryProvider]
) -> list[LayerInputs]:
    """Keys and values of each provider's tokens behind each cache, by layer and name; no cache
    changes.

    Raises:
        UsageError: the model has recurrent layers, whose state is that behind the text.
        ModelError: there are no weights for this model, or they do not fit it.
    """
    if decoder.spec.recurrent:
        raise UsageError(
            "The model has recurrent layers, which read no learned tokens at positions before the "
            "end of a text: choose a policy without restorekv()."
        )
    found: list[dict[int, dict[str, Tensor]]] = [{} for _ in caches]
    for name, provider in providers.items():

        def record(row: int, layer: int, recorded: LayerActivations, name: str = name) -> None:
            own = {"keys": recorded.keys.clone(), "values": recorded.values.clone()}
            named = {f"{name}.{side}": tensor for side, tensor in own.items()}
            found[row].setdefault(layer, {}).update(named)

        tokens = (PLACEHOLDER,) * provider.tokens
        rows = [
            BatchSegment(cache, tokens, shift=-min(len(tokens), cache.next_position))
            for cache in caches
        ]
        with decoder.soft_prompts.soft_pass(name, provider):
            decoder.read(rows, Mode.SCRATCH, record)
    return [*found]
