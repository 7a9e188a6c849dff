"""Answers that are really given, token by token, under the policy: exact match, F1, latency."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from larder.core.conversation import Question
from larder.engine.answer import check_prompt_fits
from larder.engine.engine import Engine
from larder.engine.generate import StoppingCriteria, generate, no_observer
from larder.engine.sampler import SamplingParams
from larder.session.capacity import budget_tokens
from larder.session.memory import ConversationMemory
from larder.session.prefill import decode_planner
from larder_bench.measures.base import Measure
from larder_bench.profiling.timing import percentiles
from larder_bench.results.rows import Row
from larder_bench.scoring.item_scores import NumberedQuestion, generated_items
from larder_bench.studies.cells import Cell
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.question_sequences import ContextReader, ask_all


@dataclass(frozen=True)
class GeneratedAnswers(Measure):
    """Agreement of generated answers with the expected ones, and their speed."""

    def measure(self, bench: ModelContext, cell: Cell, guess: float | None) -> Row:
        readings = ContextReader.of(bench, cell, guess)
        speaker = GeneratedAnswerScorer()
        items = ask_all(readings, cell.task, speaker)
        figures = readings.figures()
        peak = max(figures["peak_kv_bytes"], *(said.held_bytes for said in speaker.said))
        told = {"peak_kv_bytes": peak, "latency": speaker.latency()}
        return figures | told | {"items": items}


@dataclass
class GeneratedAnswerScorer:
    """Asks aloud, and remembers how long answers took."""

    said: list[TimedAnswer] = field(default_factory=list)

    def ask(
        self, engine: Engine, memory: ConversationMemory, posed: Sequence[NumberedQuestion]
    ) -> list[Row]:
        """The items of all these questions."""
        items: list[Row] = []
        for one in posed:
            said = generate_timed(engine, memory, one.question)
            self.said.append(said)
            items += generated_items(one, said.text)
        return items

    def latency(self) -> Row:
        """Seconds to the first token of an answer, and from one to the next."""
        first = [one.first_seconds for one in self.said if one.first_seconds is not None]
        later = [seconds for one in self.said for seconds in one.token_seconds]
        told = {"first_token": first, "token": later}
        return {name: percentiles(seconds) for name, seconds in told.items() if seconds}


Part = GeneratedAnswers


SPARE_ANSWER_TOKENS = 32  # that an answer may have beyond twice the expected one


@dataclass(frozen=True)
class TimedAnswer:
    """An answer and its pace.

    Args:
        first_seconds: from the question's first token read to the first token chosen; None where
            the answer is empty.
        token_seconds: between two tokens.
        held_bytes: of all caches while it was given, as `Engine.ask` would hold them.
    """

    text: str
    first_seconds: float | None
    token_seconds: tuple[float, ...]
    held_bytes: int


def generate_timed(engine: Engine, memory: ConversationMemory, question: Question) -> TimedAnswer:
    """Answer greedily on a fork of the cache, which stays as it was.

    Raises:
        InputError: the question is longer than the budget.
    """
    cache, _ = memory.activate_for(question.question)
    wrapped = memory.conversation.question_prompt.format(question=question.question)
    prompt = engine.tokenizer.encode_question(wrapped)
    check_prompt_fits(prompt, budget_tokens(memory.policy))
    longest = max(
        engine.tokenizer.count_tokens(answer) for answer in (question.answer, *question.others)
    )
    limits = StoppingCriteria(SPARE_ANSWER_TOKENS + 2 * longest, engine.stop_ids)
    fork, stamps = cache.fork(), list[float]()
    tending = decode_planner(engine.runtime, memory.policy, [fork])
    fork.reserve(len(prompt) + (limits.max_new_tokens if tending is None else 1))

    def note(row: int, token: int) -> bool:
        del row, token
        stamps.append(time.perf_counter())
        return True

    started = time.perf_counter()
    observe = no_observer if tending is None else tending.observer
    decoder = engine.loaded.decoder
    [ids] = generate(decoder, [fork], [prompt], SamplingParams(), limits, note, observe)
    text = engine.tokenizer.decode(ids).strip()
    between = tuple(later - sooner for sooner, later in zip(stamps, stamps[1:], strict=False))
    # Without a policy at work `Engine.ask` needs no copy: the fork stands for the cache itself.
    spared = cache.nbytes if tending is None else fork.shared_nbytes
    held = memory.caches.nbytes + fork.nbytes - spared
    return TimedAnswer(text, stamps[0] - started if stamps else None, between, held)
