"""Generation loop over a batch of caches: prompt ids in, generated ids out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from larder.cache.sequence import SequenceCache
from larder.core.arguments import require
from larder.core.types import AppendKind, Mode
from larder.engine.sampler import SamplingParams, TokenSampler
from larder.models.batch_segment import BatchSegment
from larder.models.decoder import Decoder
from larder.models.observers import Observer

if TYPE_CHECKING:
    from larder.engine.constraint import ConstraintMatcher


@dataclass(frozen=True)
class StoppingCriteria:
    """Stopping criteria of an answer.

    Args:
        max_new_tokens: largest number of generated tokens, at least 1.
        stop_ids: token ids that end a turn.
    """

    max_new_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, "max_new_tokens", "at least 1", self.max_new_tokens)


# Called before each forward batch with the numbers of its sequences, their segments, and the count
# of tokens that each has generated; returns the observer of the forward batch.
ObserverFactory = Callable[[Sequence[int], Sequence[BatchSegment], Sequence[int]], Observer | None]


def no_observer(numbers: Sequence[int], rows: Sequence[BatchSegment], steps: Sequence[int]) -> None:
    """`ObserverFactory` without observers: no eviction while decoding."""
    del numbers, rows, steps


# Called with the number of a sequence and its new token; returns whether generation continues.
OnToken = Callable[[int, int], bool]


# Called with the number of a sequence; returns how many generated tokens one pass may read with the
# result of a pass for each.
StepTokens = Callable[[int], int]


def one_per_step(number: int) -> int:
    """`StepTokens` of caches in which every pass may evict or recall."""
    return 1


def keep_generating(row: int, token: int) -> bool:
    """`OnToken` that continues until the stopping criteria end the sequence."""
    return True


@dataclass
class _RunningSequence:
    """Sequence in generation: its cache, the ids to read next, the ids generated so far, and those
    that a constraint forces behind them."""

    cache: SequenceCache
    unread: tuple[int, ...]
    sampler: TokenSampler
    generated: list[int] = field(default_factory=list)
    forced: deque[int] = field(default_factory=deque)

    def segment(self, stop: int) -> BatchSegment:
        """Segment that reads the first unread ids."""
        kind = AppendKind.STEP if self.generated else AppendKind.QUESTION
        return BatchSegment(self.cache, self.unread[:stop], append_kind=kind)

    def num_read(self, stop: int) -> int:
        """Generated tokens that are read once the first unread ids are."""
        return max(0, len(self.generated) - len(self.unread[stop:]))


def generate(
    decoder: Decoder,
    caches: Sequence[SequenceCache],
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    limits: StoppingCriteria,
    on_token: OnToken = keep_generating,
    make_observer: ObserverFactory = no_observer,
    contexts: Sequence[Sequence[int]] | None = None,
    matchers: Sequence[ConstraintMatcher | None] | None = None,
    step_tokens: StepTokens = one_per_step,
) -> list[list[int]]:
    """Generate from every cache and its prompt, as `GenerationBatch` does, until all end.

    Args:
        on_token: receives every token as it is chosen.

    Returns:
        Generated ids per sequence.
    """
    batch = GenerationBatch(
        decoder, caches, prompts, sampling, limits, make_observer, contexts, matchers, step_tokens
    )
    while batch.is_running:
        for number, token in batch.step():
            if not on_token(number, token):
                batch.stop(number)
    return batch.generated


class GenerationBatch:
    """Generation from several caches, all sequences packed into one batch per step.

    Each sequence gives what it would give alone. The stop token is not part of the answer. Caches
    keep the prompt and the answer; without a stop token the last token of the answer is not in the
    cache, nor are those that a constraint forced before it, and `next_position` does not count
    them. Tokens that a constraint forces need no pass of their own where `step_tokens` allows.

    Args:
        caches: one per sequence; the same cache must not appear twice.
        prompts: token ids to prefill, one tuple per sequence.
        make_observer: makes the observer of each forward batch, for decode eviction.
        contexts: all token ids before each answer, which `repetition_penalty` counts; None where
            these are `prompts`.
        matchers: what each answer must match; None for any text.
        step_tokens: how many tokens of an answer one pass may read.
    """

    def __init__(
        self,
        decoder: Decoder,
        caches: Sequence[SequenceCache],
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        limits: StoppingCriteria,
        make_observer: ObserverFactory = no_observer,
        contexts: Sequence[Sequence[int]] | None = None,
        matchers: Sequence[ConstraintMatcher | None] | None = None,
        step_tokens: StepTokens = one_per_step,
    ) -> None:
        self._decoder, self._limits, self._make_observer = decoder, limits, make_observer
        self._step_tokens = step_tokens
        self._sequences = [
            _RunningSequence(cache, prompt, TokenSampler(sampling, context, matcher))
            for cache, prompt, context, matcher in zip(
                caches, prompts, contexts or prompts, matchers or [None] * len(prompts), strict=True
            )
        ]
        self._running = dict(enumerate(self._sequences))

    @property
    def is_running(self) -> bool:
        """True if any sequence continues."""
        return bool(self._running)

    @property
    def generated(self) -> list[list[int]]:
        """Generated ids per sequence so far."""
        return [sequence.generated for sequence in self._sequences]

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Tokens generated so far, and the most that there will be."""
        done = sum(len(sequence.generated) for sequence in self._sequences)
        rest = (
            self._limits.max_new_tokens - len(each.generated) for each in self._running.values()
        )
        return done, done + sum(rest)

    def step(self) -> list[tuple[int, int]]:
        """Choose the next token of every running sequence, or of those whose next one is forced.

        Returns:
            Number of the sequence and its token, for those that did not end with a stop token.
        """
        forced = [number for number, each in self._running.items() if each.forced]
        if forced:
            chosen = ((number, self._running[number].forced.popleft()) for number in forced)
            return [found for number, token in chosen for found in self._append(number, token)]
        logits_of, chosen = self._run(), list[tuple[int, int]]()
        for number, logits in zip(list(self._running), logits_of, strict=True):
            sequence = self._running[number]
            token = sequence.sampler.sample(logits, sequence.generated)
            sequence.unread = ()
            if self._step_tokens(number) > 1:
                sequence.forced.extend(sequence.sampler.forced(len(logits)))
            chosen += self._append(number, token)
        return chosen

    def stop(self, number: int) -> None:
        """End a sequence; no effect on one that has ended."""
        self._running.pop(number, None)

    def _append(self, number: int, token: int) -> list[tuple[int, int]]:
        """Append a token to a sequence, which may end with it; none if it is a stop token."""
        sequence = self._running[number]
        if token in self._limits.stop_ids:
            del self._running[number]
            return []
        sequence.generated.append(token)
        sequence.unread = (*sequence.unread, token)
        is_full = len(sequence.generated) >= self._limits.max_new_tokens
        if is_full or (not sequence.forced and sequence.sampler.is_complete):
            del self._running[number]
        return [(number, token)]

    def _run(self) -> torch.Tensor:
        """Read the unread ids of every running sequence; logits [B, V] after the last of each."""
        while parts := self._long_parts():
            rows, observer = self._rows(parts)
            self._decoder.read(rows, Mode.APPEND, observer)
            for number, stop in parts.items():
                self._running[number].unread = self._running[number].unread[stop:]
        rows, observer = self._rows({n: len(each.unread) for n, each in self._running.items()})
        ends = torch.tensor([len(row.ids) for row in rows]).cumsum(0) - 1
        return self._decoder.forward_logits(rows, Mode.APPEND, ends.tolist(), observer)

    def _long_parts(self) -> dict[int, int]:
        """Number of ids to read first, of sequences with more generated ids than a pass may
        read."""
        found = dict[int, int]()
        for number, sequence in self._running.items():
            most = self._step_tokens(number) if sequence.generated else len(sequence.unread)
            if len(sequence.unread) > most:
                found[number] = most
        return found

    def _rows(self, parts: Mapping[int, int]) -> tuple[list[BatchSegment], Observer | None]:
        """Segments of the first unread ids of some sequences, and the observer of their pass."""
        rows = [self._running[number].segment(stop) for number, stop in parts.items()]
        steps = [self._running[number].num_read(stop) for number, stop in parts.items()]
        return rows, self._make_observer(list(parts), rows, steps)
