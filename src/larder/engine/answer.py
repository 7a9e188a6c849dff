"""Answers of a model over one cache, with their text, token ids and costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from larder.cache.sequence import SequenceCache
from larder.core.arguments import check_type
from larder.core.errors import InputError
from larder.core.memory_budget import count_of_tokens
from larder.core.progress import Progress, no_progress
from larder.core.types import TokenIds
from larder.engine.detokenizer import IncrementalDetokenizer, discard_text
from larder.engine.generate import StepTokens, StoppingCriteria, generate, one_per_step
from larder.engine.sampler import SamplingParams
from larder.models.decoder import Decoder
from larder.models.loader import LoadedModel
from larder.prefill.base import run_steps
from larder.prefill.turn_reader import TurnReader
from larder.session.capacity import budget_tokens
from larder.session.files.json_fields import valid_unicode
from larder.session.memory import ConversationMemory
from larder.session.prefill import ModelRuntime, prompts_per_cache, turn_reader
from larder.session.routing import EpisodeMatch
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

if TYPE_CHECKING:
    from larder.engine.constraint import ConstraintCompiler, ConstraintMatcher, SchemaLike


@dataclass(frozen=True)
class Answer:
    """Answer to one question, with the memory and work that it took.

    Args:
        question: the bare question.
        text: answer without the end of turn.
        ids: token ids of the answer.
        episode: number of the episode whose cache answered; None without episodes.
        similarity: similarity of the question to that episode.
        decode_seconds: time from reading the first token of the question to choosing the last
            token of the answer.
        question_tokens: tokens of the question with its template.
        held_bytes: bytes of all caches during the answer, reserved capacity included.
        pages: pages of the slow tier recalled, over layers, heads and steps.
        pages_moved: recalled pages that were not in the fast tier already.
        tokens_rebuilt: keys and values recomputed, over layers and steps, including other layers
            that the recomputation ran through.
        operations: multiplications and additions of the recomputation.

    Examples:
        >>> answer = engine.ask(memory, "Who?", max_new_tokens=8)
        >>> len(answer.ids) == answer.new_tokens <= 8
        True
    """

    question: str
    text: str
    ids: tuple[int, ...] = field(repr=False)
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
        """Number of generated tokens."""
        return len(self.ids)


@dataclass(frozen=True)
class GeneratedText:
    """Generated text with its token ids and costs.

    Args:
        text: text without the end of turn.
        ids: generated token ids.
        seconds: time from reading the first token of the prompt to choosing the last token.
        pages: pages recalled, and pages moved for it.
        work: tokens recomputed over all layers, and operations for it.
    """

    text: str
    ids: tuple[int, ...]
    seconds: float
    pages: tuple[int, int] = (0, 0)
    work: tuple[int, int] = (0, 0)

    def answer(
        self, question: str, match: EpisodeMatch | None, question_tokens: int, held_bytes: int
    ) -> Answer:
        """Convert to the answer to a question.

        Args:
            match: episode that answered; None without episodes.
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


def no_matcher() -> None:
    """Matcher factory of answers of any text."""
    return None


def answer_matchers(
    schema: SchemaLike | None, compiler: Callable[[], ConstraintCompiler]
) -> Callable[[], ConstraintMatcher | None]:
    """Factory of the matcher of each answer.

    Args:
        compiler: called if there is a schema.
    """
    if schema is None:
        return no_matcher
    from larder.engine.constraint import schema_constraint

    return partial(compiler().matcher, schema_constraint(schema))


@dataclass(frozen=True)
class AnswerOptions:
    """Sampling, limits and receivers of an answer.

    Args:
        stop: strings that end the answer.
        on_text: receives the text of the answer as it is generated.
        new_matcher: creates what the answer must match.
        progress: receives the number of tokens generated and the most to generate; at the end both
            are those generated.
    """

    sampling: SamplingParams
    max_new_tokens: int
    stop: Sequence[str] = ()
    on_text: Callable[[str], None] = discard_text
    new_matcher: Callable[[], ConstraintMatcher | None] = no_matcher
    progress: Progress = no_progress


@dataclass
class CountedStream:
    """Stream of an answer's text, whose tokens a progress counts.

    Args:
        most: tokens of the answer, at most.
    """

    stream: IncrementalDetokenizer
    progress: Progress
    most: int
    count: int = 0

    def take(self, row: int, token: int) -> bool:
        """Take the next token, as of `generate`; true if the answer ends."""
        self.count += 1
        self.progress(self.count, self.most)
        return self.stream.push(token)

    def finish(self) -> None:
        """Emit what is left, and let the progress end."""
        self.stream.finish()
        if self.count < self.most:
            self.progress(self.count, self.count)


@dataclass(frozen=True)
class AnswerGenerator:
    """Text generation over one cache: model, tokenizer and stop token ids.

    Args:
        stop_ids: token ids that end a turn.
    """

    decoder: Decoder
    tokenizer: TokenizerAdapter
    stop_ids: frozenset[int]

    def generate(
        self,
        turn: TurnReader,
        message: TokenIds,
        options: AnswerOptions,
        step_tokens: StepTokens = one_per_step,
    ) -> GeneratedText:
        """Read a message and generate the answer; the cache of the turn keeps both, the caller
        truncates it.

        Args:
            step_tokens: how many tokens of the answer one pass may read.
        """
        cache, last_tokens = turn.cache, run_steps(turn.message_steps(message))
        limits = StoppingCriteria(options.max_new_tokens, self.stop_ids)
        stream = IncrementalDetokenizer(self.tokenizer.decode, options.stop, options.on_text)
        counted = CountedStream(stream, options.progress, options.max_new_tokens)
        pages_before, work_before = cache.pages, cache.recompute_cost
        started = time.perf_counter()
        [ids] = generate(
            self.decoder,
            [cache],
            [last_tokens],
            options.sampling,
            limits,
            counted.take,
            turn.observer,
            [message],
            [options.new_matcher()],
            step_tokens,
        )
        seconds = time.perf_counter() - started
        counted.finish()
        return GeneratedText(
            text=stream.text.strip(),
            ids=tuple(ids),
            seconds=seconds,
            pages=_counter_increase(cache.pages, pages_before),
            work=_counter_increase(cache.recompute_cost, work_before),
        )


@dataclass(frozen=True)
class QuestionAnswerer:
    """Answers to questions about one prefilled conversation, which they leave unchanged."""

    runtime: ModelRuntime
    generator: AnswerGenerator
    memory: ConversationMemory

    def answer(self, question: str, options: AnswerOptions) -> Answer:
        """Answer one question.

        Raises:
            InputError: the question takes more tokens than the budget holds.
        """
        memory, tokenizer = self.memory, self.runtime.tokenizer
        valid_unicode(question, "The question")
        cache, match = memory.activate_for(question)
        prompt = tokenizer.encode_question_about(memory.conversation, question)
        check_prompt_fits(prompt, budget_tokens(memory.policy))
        is_copy, start = memory.policy.timing.excess() is not None, cache.checkpoint()
        saved = cache if is_copy else None
        if is_copy:
            cache = cache.fork()  # entries evicted while decoding cannot be restored
        episode_prompts = prompts_per_cache(self.runtime, memory.router, memory.prompts)
        own_prompts = episode_prompts[match.episode if match else 0]
        turn = turn_reader(self.runtime, memory.policy, cache, own_prompts, saved)
        turn.reserve(len(prompt) + options.max_new_tokens)
        try:
            generated = self.generator.generate(turn, prompt, options, lambda _: turn.step_tokens)
            held_bytes = memory.caches.nbytes + _bytes_beside(cache, turn, is_copy)
        finally:
            if turn.snapshot is None:
                cache.roll_back(start)
                cache.compact()
            elif not is_copy:
                self._restore(turn.snapshot)
        return generated.answer(question, match, len(prompt), held_bytes)

    def answer_each(self, questions: Sequence[str], options: AnswerOptions) -> list[Answer]:
        """Answer several questions, in order, whose tokens one progress counts."""
        answers = list[Answer]()
        for index, question in enumerate(questions):
            before = sum(each.new_tokens for each in answers)
            behind = options.max_new_tokens * (len(questions) - index - 1)

            def report(done: int, total: int, before: int = before, behind: int = behind) -> None:
                options.progress(before + done, before + total + behind)

            answers.append(self.answer(question, replace(options, progress=report)))
        return answers

    def _restore(self, snapshot: SequenceCache) -> None:
        """Make a snapshot the active cache again."""
        snapshot.compact()
        self.memory.caches.replace_active(snapshot)


def checked_questions(question: str | Sequence[str]) -> list[str]:
    """Questions of one, or of a list.

    Raises:
        BadParameter: it is neither.
        InputError: a question is blank.
    """
    expected = "a question as a string, or a list of questions"
    check_type("question", question, (str, list, tuple), expected)
    questions = [question] if isinstance(question, str) else list(question)
    for one in questions:
        check_type("question", one, str, expected)
        if not one.strip():
            raise InputError("A question is blank: write at least one word.")
    return questions


def _bytes_beside(cache: SequenceCache, turn: TurnReader, is_copy: bool) -> int:
    """Bytes that an answer holds beside the caches of its conversation."""
    if is_copy:
        return cache.nbytes - cache.shared_nbytes
    return 0 if turn.snapshot is None else turn.snapshot.nbytes


def _counter_increase(now: tuple[int, int], before: tuple[int, int]) -> tuple[int, int]:
    """Increase of two counters; those of a rebuilt cache restart at 0, which counts as none."""
    return max(now[0] - before[0], 0), max(now[1] - before[1], 0)


def check_prompt_fits(prompt: TokenIds, tokens: int) -> None:
    """Raise InputError if a question takes more tokens than the budget holds."""
    if len(prompt) > tokens:
        raise InputError(
            f"The question takes {count_of_tokens(len(prompt))}, more than the budget of {tokens} "
            "per head: "
            "shorten it, raise the budget, or give a long text as a file."
        )


def stop_ids(loaded: LoadedModel) -> frozenset[int]:
    """End-of-turn token ids of model, tokenizer and chat template."""
    named: list[Any] = [
        loaded.decoder.module.generation_config.eos_token_id,
        loaded.tokenizer.eos_token_id,
        *TokenizerAdapter(loaded.tokenizer).end_of_turn_ids()[:1],
    ]
    flat = [i for entry in named for i in (entry if isinstance(entry, list) else [entry])]
    special = set(loaded.tokenizer.all_special_ids) | set(flat[:-1])
    return frozenset(i for i in flat if i is not None and i in special)
