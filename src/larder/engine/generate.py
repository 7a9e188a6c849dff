"""Generation loop over a batch of caches: prompt ids in, generated ids out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from larder.cache.sequence import SequenceCache
from larder.core.errors import BadParameter
from larder.core.types import AppendKind, Mode
from larder.engine.sampler import SamplingParams, TokenSampler
from larder.models.decoder import Decoder
from larder.models.forward_batch import BatchSegment, Observer

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
        if self.max_new_tokens < 1:
            raise BadParameter(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")


# Called before each forward batch with the numbers of its sequences, their segments, and the count
# of tokens that each has generated; returns the observer of the forward batch.
ObserverFactory = Callable[[Sequence[int], Sequence[BatchSegment], Sequence[int]], Observer | None]


def no_observer(numbers: Sequence[int], rows: Sequence[BatchSegment], steps: Sequence[int]) -> None:
    """`ObserverFactory` without observers: no eviction while decoding."""
    del numbers, rows, steps


# Called with the number of a sequence and its new token; returns whether generation continues.
OnToken = Callable[[int, int], bool]


def keep_generating(row: int, token: int) -> bool:
    """`OnToken` that continues until the stopping criteria end the sequence."""
    del row, token
    return True


@dataclass
class _RunningSequence:
    """Sequence in generation: its cache, the ids to read next, the ids generated so far."""

    cache: SequenceCache
    unread: tuple[int, ...]
    sampler: TokenSampler
    generated: list[int] = field(default_factory=list)


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
) -> list[list[int]]:
    """Generate from every cache and its prompt, as `GenerationBatch` does, until all end.

    Args:
        on_token: receives every token as it is chosen.

    Returns:
        Generated ids per sequence.
    """
    batch = GenerationBatch(
        decoder, caches, prompts, sampling, limits, make_observer, contexts, matchers
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
    cache, and `next_position` does not count it.

    Args:
        caches: one per sequence; the same cache must not appear twice.
        prompts: token ids to prefill, one tuple per sequence.
        make_observer: makes the observer of each forward batch, for decode eviction.
        contexts: all token ids before each answer, which `repetition_penalty` counts; None where
            these are `prompts`.
        matchers: what each answer must match; None for any text.
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
    ) -> None:
        self._decoder, self._limits, self._make_observer = decoder, limits, make_observer
        self._sequences = [
            _RunningSequence(cache, prompt, TokenSampler(sampling, context, matcher))
            for cache, prompt, context, matcher in zip(
                caches,
                prompts,
                contexts or prompts,
                matchers or [None] * len(prompts),
                strict=True,
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

    def step(self) -> list[tuple[int, int]]:
        """Choose the next token of every running sequence.

        Returns:
            Number of the sequence and its token, for those that did not end with a stop token.
        """
        logits_of, chosen = (
            _step(self._decoder, self._running, self._make_observer),
            list[tuple[int, int]](),
        )
        for number, logits in zip(list(self._running), logits_of, strict=True):
            sequence = self._running[number]
            token = sequence.sampler.sample(logits, sequence.generated)
            if token in self._limits.stop_ids:
                del self._running[number]
                continue
            sequence.generated.append(token)
            sequence.unread = (token,)
            chosen.append((number, token))
            is_full = len(sequence.generated) >= self._limits.max_new_tokens
            if is_full or sequence.sampler.is_complete:
                del self._running[number]
        return chosen

    def stop(self, number: int) -> None:
        """End a sequence; no effect on one that has ended."""
        self._running.pop(number, None)


def _step(
    decoder: Decoder, running: Mapping[int, _RunningSequence], make_observer: ObserverFactory
) -> torch.Tensor:
    """Run the unread ids of every sequence; logits [B, V] after the last token of each."""
    rows = [
        BatchSegment(
            s.cache, s.unread, append_kind=AppendKind.STEP if s.generated else AppendKind.QUESTION
        )
        for s in running.values()
    ]
    ends = torch.tensor([len(row.ids) for row in rows]).cumsum(0) - 1
    observer = make_observer(list(running), rows, [len(s.generated) for s in running.values()])
    return decoder.forward_logits(rows, Mode.APPEND, ends.tolist(), observer)
