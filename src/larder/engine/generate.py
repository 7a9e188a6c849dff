"""The loop: a prompt goes in, tokens come out. Token ids only, no text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from larder.cache.sequence import SequenceCache
from larder.core.errors import BadParameter
from larder.core.types import AppendKind, Mode
from larder.engine.sampler import SamplingParams
from larder.models.decoder import Decoder
from larder.models.forward_batch import BatchSegment, Observer


@dataclass(frozen=True)
class StoppingCriteria:
    """When an answer ends.

    Args:
        max_new_tokens: at most so many tokens.
        stops: token ids that end a turn.
    """

    max_new_tokens: int = 256
    stops: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise BadParameter(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")


# Called before each pass with the numbers of its rows, the rows, and the tokens each has generated;
# gives the observer of the pass.
ObserverFactory = Callable[[Sequence[int], Sequence[BatchSegment], Sequence[int]], Observer | None]


def no_observer(numbers: Sequence[int], rows: Sequence[BatchSegment], steps: Sequence[int]) -> None:
    """Nothing acts while generating."""
    del numbers, rows, steps


# Called with the number of the row and its new token; returns whether the row goes on.
OnToken = Callable[[int, int], bool]


def keep_generating(row: int, token: int) -> bool:
    """Goes on until the limits say stop."""
    del row, token
    return True


@dataclass
class _RunningSequence:
    """One sequence on its way: what it must read next, what it has said."""

    cache: SequenceCache
    unread: tuple[int, ...]
    source: torch.Generator
    said: list[int] = field(default_factory=list)


def generate(
    decoder: Decoder,
    caches: Sequence[SequenceCache],
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    limits: StoppingCriteria,
    on_token: OnToken = keep_generating,
    tend: ObserverFactory = no_observer,
) -> list[list[int]]:
    """Continue every cache with its prompt, all rows packed into one pass per step.

    Each row gives what it would give alone. The stop token is not part of the answer. Caches keep
    the prompt and the answer; where no stop token ended it, its last token was never read, and
    `next_position` says so.

    Args:
        caches: one per row; the same cache must not appear twice.
        prompts: token ids to read first, one per row.
        on_token: told of every token as it is chosen.
        tend: gives each pass its observer; a policy that acts while generating.
    """
    streams = [
        _RunningSequence(cache, prompt, sampling.generator())
        for cache, prompt in zip(caches, prompts, strict=True)
    ]
    going = dict(enumerate(streams))
    while going:
        logits_of = _step(decoder, going, tend)
        for number, logits in zip(list(going), logits_of, strict=True):
            stream = going[number]
            token = sampling.choose(logits, stream.source)
            if token in limits.stops:
                del going[number]
                continue
            stream.said.append(token)
            stream.unread = (token,)
            if not on_token(number, token) or len(stream.said) >= limits.max_new_tokens:
                del going[number]
    return [stream.said for stream in streams]


def _step(
    decoder: Decoder, going: Mapping[int, _RunningSequence], tend: ObserverFactory
) -> torch.Tensor:
    """Read what each stream has unread; logits [rows, V] behind its last token."""
    rows = [
        BatchSegment(
            s.cache, s.unread, append_kind=AppendKind.STEP if s.said else AppendKind.QUESTION
        )
        for s in going.values()
    ]
    ends = torch.tensor([len(row.ids) for row in rows]).cumsum(0) - 1
    observer = tend(list(going), rows, [len(stream.said) for stream in going.values()])
    return decoder.forward_logits(rows, Mode.APPEND, ends.tolist(), observer)
