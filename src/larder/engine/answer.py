"""What comes back for a question."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from larder.cache.forms.rebuilt import recompute_cost
from larder.cache.sequence import SequenceCache
from larder.core.errors import InputError
from larder.engine.detokenizer import IncrementalDetokenizer
from larder.engine.generate import ObserverFactory, StoppingCriteria, generate, no_observer
from larder.engine.sampler import SamplingParams
from larder.models.decoder import Decoder
from larder.session.episodes.matching import EpisodeMatch
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter


@dataclass(frozen=True)
class Answer:
    """An answer and what it took.

    Args:
        question: as asked.
        text: the answer, without its end of turn.
        ids: its tokens.
        episode: the number of the episode that answered; None where there are none.
        similarity: of the question to that episode.
        decode_seconds: from the question's first token read to the answer's last token chosen.
        question_tokens: tokens of the question's turn.
        held_bytes: of all caches together while it was given, with the room set aside for it.
        pages: of the slow tier that were asked for while answering, over layers, heads and steps.
        pages_moved: those of them that were not in the fast tier already.
        tokens_rebuilt: keys and values that were computed again while answering, over layers and
            steps, and those of other layers that had to be run through for it.
        operations: multiplications and additions that this took.
    """

    question: str
    text: str
    ids: tuple[int, ...]
    episode: int | None
    similarity: float | None
    decode_seconds: float
    question_tokens: int
    held_bytes: int
    pages: int = 0
    pages_moved: int = 0
    tokens_rebuilt: int = 0
    operations: int = 0

    @property
    def new_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Completion:
    """What was said.

    Args:
        text: without the end of turn.
        ids: its tokens.
        seconds: from the prompt's first token read to the last token chosen.
        pages: that were recalled meanwhile, and how many of them had to be moved.
        work: tokens that were rebuilt meanwhile, over layers, and operations that this took.
    """

    text: str
    ids: tuple[int, ...]
    seconds: float
    pages: tuple[int, int] = (0, 0)
    work: tuple[int, int] = (0, 0)

    def answer(
        self, question: str, match: EpisodeMatch | None, question_tokens: int, held_bytes: int
    ) -> Answer:
        """It as the answer to a question.

        Args:
            match: the episode that answered; None where there are none.
            question_tokens, held_bytes: as in `Answer`.
        """
        return Answer(
            question=question,
            text=self.text,
            ids=self.ids,
            episode=None if match is None else match.episode,
            similarity=None if match is None else match.similarity,
            decode_seconds=self.seconds,
            question_tokens=question_tokens,
            held_bytes=held_bytes,
            pages=self.pages[0],
            pages_moved=self.pages[1],
            tokens_rebuilt=self.work[0],
            operations=self.work[1],
        )


@dataclass(frozen=True)
class AnswerGenerator:
    """A model that answers.

    Args:
        stops: token ids that end a turn.
    """

    decoder: Decoder
    scribe: TokenizerAdapter
    stops: frozenset[int]

    def generate(
        self,
        cache: SequenceCache,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        max_new_tokens: int,
        stop: Sequence[str],
        on_text: Callable[[str], None],
        tend: ObserverFactory = no_observer,
    ) -> Completion:
        """Read the prompt and answer it; the cache keeps both, so the caller settles what stays.

        Args:
            stop: strings that end the answer.
            on_text: told of the answer's text as it comes.
            tend: a policy that acts while the answer is generated.
        """
        limits = StoppingCriteria(max_new_tokens, self.stops)
        stream = IncrementalDetokenizer(self.scribe.decode, stop, on_text)
        before, started = (cache.pages, recompute_cost(cache.stores)), time.perf_counter()
        [ids] = generate(
            self.decoder,
            [cache],
            [prompt],
            sampling,
            limits,
            lambda row, token: stream.push(token),
            tend,
        )
        seconds = time.perf_counter() - started
        stream.finish()
        after = cache.pages, recompute_cost(cache.stores)
        told = [_counter_increase(now, then) for now, then in zip(after, before, strict=True)]
        return Completion(stream.text.strip(), tuple(ids), seconds, *told)


def _counter_increase(now: tuple[int, int], then: tuple[int, int]) -> tuple[int, int]:
    """What two counts have grown by; a cache that was laid out anew counts from 0."""
    return max(now[0] - then[0], 0), max(now[1] - then[1], 0)


def check_prompt_fits(prompt: tuple[int, ...], tokens: int) -> None:
    """Raises: InputError: a question takes more tokens than the budget holds."""
    if len(prompt) > tokens:
        raise InputError(
            f"The question takes {len(prompt)} tokens, more than the budget of {tokens} per head: "
            "shorten it, raise --budget, or give a long text as a file."
        )
