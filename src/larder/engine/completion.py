"""Completion of prompts under a policy: of one, of a batch, or as a stream of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from larder.cache.sequence import SequenceCache
from larder.core.arguments import check_count, check_type
from larder.core.conversation import Conversation, Message, PromptLayout
from larder.core.errors import InputError
from larder.core.observation import Prompts
from larder.engine.detokenizer import CONTEXT_TOKENS, IncrementalDetokenizer, stop_strings
from larder.engine.generate import GenerationBatch, StoppingCriteria
from larder.engine.progress_bar import progress_or_bar
from larder.engine.sampler import SamplingParams
from larder.models.batch_segment import BatchSegment
from larder.models.observers import LayerActivations, Observer
from larder.prefill.base import Progress, no_progress, run_steps
from larder.prefill.turn_reader import TurnReader
from larder.session.capacity import resolve_budget
from larder.session.files.json_fields import valid_unicode
from larder.session.memory import CacheFigures
from larder.session.policy import Policy
from larder.session.prefill import (
    ModelRuntime,
    PrefillInput,
    SizeOptions,
    prefill_memory,
    prompts_per_cache,
    turn_reader,
)
from larder.session.transcript.tokenizer_adapter import TokenizedTranscript

if TYPE_CHECKING:
    from larder.models.processor import MergedText

Images = Sequence[Sequence[Any]] | None  # images of each prompt
PROMPT_TYPES = (
    "a prompt as a string, or a list of prompts (a chat template makes one of messages, "
    "tokenizer.decode one of ids)"
)
ROUTED_TOKENS = 64  # end of a prompt, which chooses among the episodes of the prompt


@dataclass(frozen=True)
class Completion:
    """Continuation of a prompt. `str()` is its text.

    Args:
        prompt: the prompt as it was given.
        text: text after the prompt, white space included, without the stop token or stop string.
        ids: generated token ids, without the stop token.
        finish_reason: `stop` after a stop token or stop string, `length` after max_new_tokens.
        prompt_tokens: tokens of the prompt.
        kv_bytes: bytes of the caches once the prompt was read.
        full_kv_bytes: a plain cache of the same length, states of recurrent layers included.

    Examples:
        >>> completion = engine.generate("Once upon a time", max_new_tokens=8)
        >>> str(completion) == completion.text
        True
    """

    prompt: str = field(repr=False)
    text: str
    ids: tuple[int, ...] = field(repr=False)
    finish_reason: str
    prompt_tokens: int
    kv_bytes: int
    full_kv_bytes: int

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class CompletionOptions:
    """Options of a completion.

    Args:
        max_new_tokens: largest number of generated tokens, at least 1.
        stop: a string that ends the text, or several.

    Raises:
        BadParameter: an option has a wrong type or is out of range.
    """

    sampling: SamplingParams
    max_new_tokens: int
    stop: str | Sequence[str]

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens)
        stop_strings(self.stop)

    @property
    def stops(self) -> tuple[str, ...]:
        """All stop strings."""
        return stop_strings(self.stop)


@dataclass(frozen=True)
class EncodedPrompt:
    """Prompt as text, and the token ids that are read.

    Args:
        merged: the prompt with its images; None where it has none.
    """

    text: str
    ids: tuple[int, ...]
    merged: MergedText | None = None


@dataclass(frozen=True)
class PromptCache:
    """Cache of the tokens of a prompt but the last.

    Args:
        policy: policy with every size filled in.
        prompts: scoring prompts of the cache, by name.
    """

    cache: SequenceCache
    policy: Policy
    prompts: Prompts
    figures: CacheFigures


@dataclass(frozen=True)
class _ReadPrompt:
    """Prompt whose tokens but the last are in a cache."""

    prompt: str
    ids: tuple[int, ...]
    turn: TurnReader
    figures: CacheFigures


def prefill_prompt(
    runtime: ModelRuntime,
    policy: Policy,
    sizes: SizeOptions,
    prompt: EncodedPrompt,
    progress: Progress = no_progress,
) -> PromptCache:
    """Read the tokens of a prompt but the last into a cache of its own, under a policy.

    The end of the prompt chooses among its episodes, under a policy that forms any.

    Args:
        sizes: sizes that the policy leaves open; shares are of the whole prompt.
        progress: receives the number of prompt tokens read and to read.

    Raises:
        UsageError, BudgetError: sizes contradict each other or do not fit.
    """
    ids, spec = prompt.ids, runtime.decoder.spec
    tokens = resolve_budget(policy, sizes.budget, len(ids), spec)
    policy = policy.with_sizes(tokens, sizes.block)
    if prompt.merged is not None:
        from larder.session.image_prefill import prefill_images

        read = prefill_images(runtime, policy, prompt.merged, progress)
        return PromptCache(read.cache, policy, read.prompts, read.figures)
    context = ids[:-1]
    messages = (Message("user", prompt.text),) if context else ()
    source = PrefillInput(
        Conversation("prompt", messages, form=PromptLayout.PLAIN),
        TokenizedTranscript(context, ((0, len(context)),) if context else ()),
    )
    memory = prefill_memory(runtime, source, policy, {}, progress)
    cache, match = memory.activate_for(runtime.tokenizer.decode(ids[-ROUTED_TOKENS:]))
    scoring = prompts_per_cache(runtime, memory.router, {})[match.episode if match else 0]
    return PromptCache(cache, policy, scoring, memory.figures)


class PromptCompleter:
    """Completion of prompts, each read into a cache of its own under a policy.

    All tokens of a prompt but the last are read as a context. The last one is the first pass of
    generation, whose steps run for all prompts together. Each prompt gives what it would give
    alone.

    Args:
        stop_ids: token ids that end a text.
        processor: processor of a model with a vision tower, for prompts with images.
    """

    def __init__(
        self,
        runtime: ModelRuntime,
        policy: Policy,
        sizes: SizeOptions,
        stop_ids: frozenset[int],
        processor: Any = None,
    ) -> None:
        self._runtime, self._policy, self._sizes = runtime, policy, sizes
        self._stop_ids, self._processor = stop_ids, processor

    def complete(
        self,
        prompts: Sequence[str],
        options: CompletionOptions,
        progress: Progress | None,
        images: Images = None,
    ) -> list[Completion]:
        """Complete prompts, in order.

        Args:
            images: images of each prompt; None for none.
            progress: receives the number of prompt tokens read and to read, then of tokens
                generated and the most to generate; None shows a bar for each.
        """
        return self.complete_encoded(self._encode(prompts, images), options, progress)

    def complete_given(
        self,
        prompts: str | Sequence[str],
        options: CompletionOptions,
        progress: Progress | None,
        images: Sequence[Any] | None,
    ) -> Completion | list[Completion]:
        """Complete one prompt or several, as a caller gave them.

        Raises:
            BadParameter: what was given is no text, nor a list of texts.
        """
        check_type("prompts", prompts, (str, list, tuple), PROMPT_TYPES)
        several = [prompts] if isinstance(prompts, str) else list(prompts)
        for prompt in several:
            check_type("prompts", prompt, str, PROMPT_TYPES)
        given = [images] if images is not None and isinstance(prompts, str) else images
        completions = self.complete(several, options, progress, given)
        return completions[0] if isinstance(prompts, str) else completions

    def complete_encoded(
        self,
        prompts: Sequence[EncodedPrompt],
        options: CompletionOptions,
        progress: Progress | None = no_progress,
    ) -> list[Completion]:
        """Complete prompts that are encoded, in order."""
        rows = self._read(prompts, options, progress)
        texts = [self._detokenizer(row, options, []) for row in rows]
        batch, stopped = self._batch(rows, options), set[int]()
        with progress_or_bar(progress, "Generating", "tokens") as report:
            while batch.is_running:
                for number, token in batch.step():
                    if not texts[number].push(token):
                        stopped.add(number)
                        batch.stop(number)
                report(*batch.num_tokens)
        full = {
            number
            for number, ids in enumerate(batch.generated)
            if len(ids) == options.max_new_tokens
        }
        return [
            _completion(row, text.text, ids, number in full - stopped)
            for number, (row, text, ids) in enumerate(
                zip(rows, texts, batch.generated, strict=True)
            )
        ]

    def stream(
        self,
        prompt: str,
        options: CompletionOptions,
        progress: Progress | None,
        images: Images = None,
    ) -> Iterator[str]:
        """Text of a completion in parts, each as soon as it will not change any more.

        Args:
            images: images of the prompt, in a list of one; None for none.
        """
        encoded, parts = self._encode([prompt], images), list[str]()
        rows = self._read(encoded, options, progress)
        text = self._detokenizer(rows[0], options, parts)
        batch = self._batch(rows, options)
        while batch.is_running:
            for number, token in batch.step():
                if not text.push(token):
                    batch.stop(number)
            if not batch.is_running:
                text.finish()
            yield from parts
            parts.clear()

    def _read(
        self,
        prompts: Sequence[EncodedPrompt],
        options: CompletionOptions,
        progress: Progress | None,
    ) -> list[_ReadPrompt]:
        rows, total = list[_ReadPrompt](), sum(len(prompt.ids) for prompt in prompts)
        with progress_or_bar(progress, "Reading", "tokens") as report:
            for prompt in prompts:
                before = sum(len(row.ids) for row in rows)
                rows.append(
                    self._read_prompt(
                        prompt,
                        options.max_new_tokens,
                        lambda done, _, before=before: report(before + done, total),
                    )
                )
        return rows

    def _encode(self, prompts: Sequence[str], images: Images) -> list[EncodedPrompt]:
        encode = self._runtime.tokenizer.encode_prompt
        named = [valid_unicode(prompt, f"Prompt {n}") for n, prompt in enumerate(prompts, start=1)]
        if images is not None:
            from larder.session.image_prefill import encode_image_prompts

            read = encode_image_prompts(self._runtime, self._processor, named, images)
            pairs = zip(named, read, strict=True)
            return [EncodedPrompt(text, ids, merged) for text, (ids, merged) in pairs]
        encoded = [EncodedPrompt(prompt, encode(prompt)) for prompt in named]
        for number, prompt in enumerate(encoded, start=1):
            if not prompt.ids:
                raise InputError(f"Prompt {number} has no tokens: give it at least one character.")
        return encoded

    def _read_prompt(
        self, prompt: EncodedPrompt, new_tokens: int, progress: Progress
    ) -> _ReadPrompt:
        read = prefill_prompt(self._runtime, self._policy, self._sizes, prompt, progress)
        # The cache itself in place of a snapshot: nothing is undone, so that no copy is needed.
        turn = turn_reader(self._runtime, read.policy, read.cache, read.prompts, read.cache)
        turn.reserve(1 + new_tokens)
        return _ReadPrompt(prompt.text, prompt.ids, turn, read.figures)

    def _batch(self, rows: Sequence[_ReadPrompt], options: CompletionOptions) -> GenerationBatch:
        return GenerationBatch(
            self._runtime.decoder,
            [row.turn.cache for row in rows],
            [run_steps(row.turn.message_steps(row.ids[-1:])) for row in rows],
            options.sampling,
            StoppingCriteria(options.max_new_tokens, self._stop_ids),
            _TurnObservers([row.turn for row in rows]),
            [row.ids for row in rows],
        )

    def _detokenizer(
        self, row: _ReadPrompt, options: CompletionOptions, parts: list[str]
    ) -> IncrementalDetokenizer:
        """Detokenizer that appends what it emits to `parts`."""
        decode, context = self._runtime.tokenizer.decode, row.ids[-CONTEXT_TOKENS:]
        return IncrementalDetokenizer(decode, options.stops, parts.append, context)


class _TurnObservers:
    """`ObserverFactory` of a batch whose sequences have a turn reader each."""

    def __init__(self, turns: Sequence[TurnReader]) -> None:
        self._turns = turns

    def __call__(
        self, numbers: Sequence[int], rows: Sequence[BatchSegment], steps: Sequence[int]
    ) -> Observer | None:
        observers = [
            self._turns[number].observer([0], [row], [step])
            for number, row, step in zip(numbers, rows, steps, strict=True)
        ]
        by_row = {row: each for row, each in enumerate(observers) if each is not None}

        def observe(row: int, layer: int, activations: LayerActivations) -> None:
            if row in by_row:
                by_row[row](0, layer, activations)

        return observe if by_row else None


def _completion(row: _ReadPrompt, text: str, ids: Sequence[int], is_full: bool) -> Completion:
    return Completion(
        prompt=row.prompt,
        text=text,
        ids=tuple(ids),
        finish_reason="length" if is_full else "stop",
        prompt_tokens=len(row.ids),
        kv_bytes=row.figures.kv_bytes,
        full_kv_bytes=row.figures.full_kv_bytes,
    )
