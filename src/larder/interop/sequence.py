"""Sequence of a batch row: its cache, read and kept within the budget as a conversation is."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import torch
from jaxtyping import Int
from torch import Tensor

from larder.cache.recurrent_state import CacheCheckpoint
from larder.cache.sequence import SequenceCache
from larder.core.errors import CacheError, UsageError
from larder.core.images import NO_IMAGES, ImageSpans
from larder.core.observation import Calibration, Prompts
from larder.core.types import TokenIds
from larder.engine.progress_bar import progress_or_bar
from larder.interop.dynamic_cache import FORMS
from larder.models.batch_segment import BatchSegment
from larder.models.calibration import calibrate
from larder.models.decoder import Decoder
from larder.models.observers import JoinedObserver, Observer
from larder.models.verification import check_tokenizer
from larder.policy.compensation.drop import Drop
from larder.prefill.base import run_steps
from larder.prefill.decode_eviction import DecodeEviction
from larder.prefill.memory import PeakMemoryMeter
from larder.prefill.reader import PrefillSequence
from larder.session.capacity import check_recent_fits, empty_cache, entries_per_head, resolve_budget
from larder.session.default_policy import for_model
from larder.session.embedders.base import Embedder
from larder.session.image_prefill import check_images
from larder.session.policy import Policy
from larder.session.prefill import (
    COMMON_PROMPTS,
    ModelRuntime,
    SizeOptions,
    common_prompts,
    decode_planner,
    prefill_reader,
    require_prompts,
    warm_up,
)
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter


class MissingTokenizer(TokenizerAdapter):
    """Tokenizer adapter of a cache that was given no tokenizer: any use is an error."""

    def __init__(self) -> None:
        """Without a tokenizer."""

    def encode(self, text: str) -> NoReturn:
        raise UsageError(
            f"The policy needs a tokenizer (for {text[:60]}): give tokenizer=, the one that came "
            "with the model."
        )

    def lexicon(self, names: Any) -> dict[str, frozenset[int]]:
        if names:
            self.encode(", ".join(sorted(names)))
        return {}


@dataclass(frozen=True)
class SequenceFactory:
    """Model, policy and sizes that sequences are made with.

    Args:
        policy: policy whose open sizes each sequence fills in by its own first text.
        prompts: scratch prompts by name.
    """

    runtime: ModelRuntime
    policy: Policy
    sizes: SizeOptions
    prompts: Prompts

    def create(self, num_tokens: int) -> GeneratedSequence:
        """Empty sequence for a first text of `num_tokens` tokens.

        Raises:
            UsageError, BudgetError: sizes contradict each other or do not fit.
        """
        spec = self.runtime.decoder.spec
        tokens = resolve_budget(self.policy, self.sizes.budget, num_tokens, spec)
        policy = self.policy.with_sizes(tokens, self.sizes.block)
        check_recent_fits(policy, entries_per_head(policy, spec))
        return GeneratedSequence(self.runtime, policy, self.prompts)

    def check(self) -> None:
        """Check the policy, and load what it needs beside the model.

        Raises:
            UsageError: the policy forms episodes, or needs a tokenizer that was not given.
        """
        if self.policy.session.embedders():
            raise UsageError(
                "The policy forms episodes of a conversation, but generate() has token ids alone: "
                "leave episodes() out, or read the conversation with larder.Engine."
            )
        self.runtime.tokenizer.lexicon(self.policy.lexicon)
        names = self.policy.scorer.required_prompts()
        require_prompts(dict.fromkeys(COMMON_PROMPTS, ()), names)
        if names and not self.prompts:
            self.runtime.tokenizer.encode(f"its prompt {sorted(names)[0]!r}")
        warm_up(self.runtime, self.policy)


@dataclass(frozen=True)
class RowColumns:
    """Columns of a row of a batch: all, and those that hold no token of it."""

    length: int = 0
    empty: tuple[int, ...] = ()

    def extended(self, columns: tuple[int, ...], num_columns: int) -> RowColumns:
        """With the columns of a call, of which `columns` hold tokens."""
        held = set(columns)
        empty = tuple(self.length + c for c in range(num_columns) if c not in held)
        return RowColumns(self.length + num_columns, self.empty + empty)

    def without_last(self, num_columns: int) -> RowColumns:
        """Without the last columns."""
        length = self.length - num_columns
        return RowColumns(length, tuple(c for c in self.empty if c < length))

    def num_last_tokens(self, num_columns: int) -> int:
        """Tokens in the last columns."""
        return num_columns - sum(c >= self.length - num_columns for c in self.empty)


@dataclass(frozen=True)
class SequenceState:
    """State of a sequence before a call, to return to if the call fails."""

    checkpoint: CacheCheckpoint
    plans: int
    eviction: DecodeEviction | None
    num_generated: int
    columns: RowColumns
    has_ended: bool


class GeneratedSequence:
    """One row of a batch under a policy with all sizes filled in.

    Texts are read by the prefill schedule of the policy, generated tokens one by one under its
    timing. `has_ended`: the row has generated an end token.
    """

    def __init__(self, runtime: ModelRuntime, policy: Policy, prompts: Prompts) -> None:
        self.policy = policy
        self.cache = empty_cache(policy, runtime.decoder.spec)
        self.has_ended = False
        self.peak_bytes = 0
        self._runtime, self._prompts = runtime, prompts
        self._eviction: DecodeEviction | None = None
        self._num_generated, self._num_reserved = 0, 0
        self._columns = RowColumns()

    def place(self, positions: Int[Tensor, "A N"]) -> None:
        """Record the positions of the next tokens where the model's RoPE counts several of each."""
        cache = self.cache
        cache.model_positions = cache.model_positions.extended(cache.next_position, positions)

    def read(self, ids: TokenIds, images: ImageSpans = NO_IMAGES) -> None:
        """Read a text behind the cache, and bring the cache within its budget.

        Args:
            images: images in the text, which no block cuts.
        """
        spec, length = self._runtime.decoder.spec, self.cache.next_position + len(ids)
        if self.cache.next_position:
            length = max(length, entries_per_head(self.policy, spec))
        meter = PeakMemoryMeter()
        reader = prefill_reader(self._runtime, self.policy, length, meter)
        images = images.shifted(self.cache.next_position)
        sequence = PrefillSequence(self.cache, self._prompts, images=images)
        with progress_or_bar(None, "Reading", "tokens") as progress:
            run_steps(self.policy.schedule.steps(reader, [sequence], ids), progress)
        self.peak_bytes = max(self.peak_bytes, meter.peak_bytes)
        self._eviction = decode_planner(self._runtime, self.policy, [self.cache])
        self._num_generated, self._num_reserved, self.has_ended = 0, 0, False

    def resume(self, cache: SequenceCache) -> None:
        """Continue with a cache in the form of the policy, in place of the own one."""
        self.cache, self._columns = cache, RowColumns(cache.next_position)
        self._eviction = decode_planner(self._runtime, self.policy, [cache])
        self._num_generated, self._num_reserved, self.has_ended = 0, 0, False

    def check_embeddings(self, ids: TokenIds) -> None:
        """Check that the policy can read a text of embeddings whose ids are not known.

        Raises:
            UsageError: a part of the policy reads token ids.
        """
        planner = self.policy.planner
        scratches = planner.scorer.scratch(ids, self.cache.next_position, self._prompts)
        reads_ids = planner.token_providers or self.policy.lexicon or self.policy.rebuilding
        if scratches or reads_ids:
            raise UsageError(
                f"The policy {self.policy} reads token ids, but generate() was given inputs_embeds "
                "alone: give input_ids, or a policy that scores by attention, keys or values."
            )

    def check_images(self, ids: TokenIds, images: ImageSpans) -> None:
        """Check that the policy can read a text with images, whose tokens ids do not tell.

        Raises:
            UsageError: a part of the policy reads image tokens again, or what predicted them.
        """
        check_images(self.policy, ids, images, self.cache.next_position, self._prompts)

    def step(self, ids: TokenIds) -> tuple[BatchSegment, Observer | None]:
        """Segment of generated tokens, and the observer of their forward batch."""
        segment = BatchSegment(self.cache, ids)
        self._num_generated += len(ids)
        if self._eviction is None:
            return segment, None
        return segment, self._eviction.observer([0], [segment], [self._num_generated])

    def reserve(self, num_tokens: int) -> None:
        """Make room for generated tokens that may be taken back."""
        self.cache.reserve(num_tokens)
        self._num_reserved = max(self._num_reserved, num_tokens)

    def extend_columns(self, columns: tuple[int, ...], num_columns: int) -> None:
        """Record the columns of a call, `num_columns` in all, of which some hold tokens."""
        self._columns = self._columns.extended(columns, num_columns)

    def check_truncation(self, num_columns: int) -> None:
        """Check that the tokens of the last columns can be dropped: their entries, and those that
        they moved out of sliding windows, are still held.

        Raises:
            CacheError: they cannot.
        """
        num_tokens = self._columns.num_last_tokens(num_columns)
        if not num_tokens:
            return
        if self._eviction is not None:
            raise CacheError(
                f"{num_tokens} tokens cannot be taken back, because the policy evicts at every "
                "step: use a policy with prefill_only()."
            )
        limit = self._num_generated
        if any(layer.sliding_window is not None for layer in self.cache.spec.layers):
            limit = min(limit, self._num_reserved)
        if num_tokens > limit and self._has_exact_entries():
            limit = max(limit, num_last_entries(self.cache))
        if num_tokens > limit:
            raise CacheError(
                f"{num_tokens} tokens cannot be taken back, because only the last {limit} have "
                "their entries in every head, and left sliding windows whole: take back fewer, or "
                "continue with a fork() of the cache from before them."
            )

    def _has_exact_entries(self) -> bool:
        """True if entries are keys and values as the model made them, and nothing else."""
        spec = self.cache.cache_spec
        given = [option for option in spec.options().values() if option is not None]
        return spec.form in FORMS and not given and self.policy.compensation == Drop()

    def truncate(self, num_columns: int) -> None:
        """Drop the tokens of the last columns, for which `check_truncation` passed."""
        num_tokens = self._columns.num_last_tokens(num_columns)
        if num_tokens:
            self.cache.truncate(self.cache.next_position - num_tokens)
            self._num_generated = max(0, self._num_generated - num_tokens)
            self.has_ended = False
        self._columns = self._columns.without_last(num_columns)

    def fork(self) -> GeneratedSequence:
        """Independent copy."""
        other = copy.copy(self)
        other.cache = self.cache.fork()
        other._num_reserved = 0  # the copy holds windows alone
        return other

    def state(self) -> SequenceState:
        """State to return to with `roll_back`."""
        return SequenceState(
            self.cache.checkpoint(),
            self.cache.plans,
            self._eviction,
            self._num_generated,
            self._columns,
            self.has_ended,
        )

    def roll_back(self, state: SequenceState) -> None:
        """Return to a state; the cache becomes unusable if a plan was applied since."""
        if self.cache.plans != state.plans:
            self.cache.invalidate()
        else:
            self.cache.roll_back(state.checkpoint)
        self._eviction, self._num_generated = state.eviction, state.num_generated
        self._columns, self.has_ended = state.columns, state.has_ended


def num_last_entries(cache: SequenceCache) -> int:
    """Number of last tokens that can be dropped, so that the cache is as before them: every head
    holds their entries, and sliding windows those that the token in front of them saw.
    """
    length, limits = cache.next_position, list[int]()
    for layer in cache.spec.holders:
        entries = cache.entries(layer.index)
        for positions in entries.packed_positions().split(list(entries.lengths)):
            if layer.sliding_window is not None:
                first = int(positions.min())
                limits.append(length - (first + layer.sliding_window - 1) if first else length)
                continue
            last = torch.arange(length - len(positions), length, device=positions.device)
            missing = (positions != last).nonzero()
            limits.append(
                len(positions) - int(missing.max()) - 1 if len(missing) else len(positions)
            )
    return max(0, min(limits))


@dataclass(frozen=True)
class EndTokens:
    """Tokens that end a row, and those that a row which has ended is fed with."""

    stop_ids: frozenset[int]
    padding: frozenset[int]

    @staticmethod
    def of(config: Any) -> EndTokens:
        """End tokens of a generation configuration; padding is its own or an end token."""
        named, padding = config.eos_token_id, config.pad_token_id
        stops = frozenset(named if isinstance(named, list) else [named]) - {None}
        return EndTokens(stops, (stops | {padding}) - {None})

    def is_padding(self, sequence: GeneratedSequence, ids: TokenIds) -> bool:
        """True for padding behind the end of a row."""
        return sequence.has_ended and len(ids) == 1 and ids[0] in self.padding


def observer_of(observers: list[Observer | None]) -> Observer | None:
    """Observer of a batch whose segments have an observer each; None if they have none."""
    own = {row: observer for row, observer in enumerate(observers) if observer is not None}
    return JoinedObserver(own) if own else None


def sequence_factory(
    decoder: Decoder, policy: Policy, sizes: SizeOptions, tokenizer: Any
) -> SequenceFactory:
    """Factory of the rows of a cache.

    Args:
        tokenizer: tokenizer of transformers; None where the policy needs none.

    Raises:
        BadParameter: it is no tokenizer of the model.
        UsageError: the policy cannot be used inside generate().
    """
    if tokenizer is not None:
        check_tokenizer(tokenizer, decoder.module)
    adapter = MissingTokenizer() if tokenizer is None else TokenizerAdapter(tokenizer)
    prompts = {} if tokenizer is None else common_prompts(adapter)

    @cache
    def measured(names: frozenset[str]) -> Calibration:
        return calibrate(decoder, adapter.encode, names)

    runtime = ModelRuntime(decoder, adapter, _no_embedder, measured)
    policy = for_model(policy, decoder.spec)
    factory = SequenceFactory(runtime, policy, sizes, prompts)
    factory.check()
    return factory


def _no_embedder(name: str) -> Embedder:
    raise UsageError(f"The embedder {name!r} is for episodes: use larder.Engine.")
