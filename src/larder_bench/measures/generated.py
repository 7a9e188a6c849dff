"""Generated answers under a policy: exact match, F1 and latency."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from larder.core import Question
from larder.engine import Engine, SamplingParams, StoppingCriteria, check_prompt_fits, no_observer
from larder.engine.generate import generate
from larder.session import ConversationMemory, budget_tokens, decode_planner
from larder_bench.measures.base import Measure
from larder_bench.profiling.timing import percentiles
from larder_bench.results.rows import Row
from larder_bench.scoring.item_scores import NumberedQuestion, generated_items
from larder_bench.studies.cells import Cell
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.question_sequences import ConversationReader, ask_all

SPARE_ANSWER_TOKENS = 32  # that an answer may have beyond twice the expected length


@dataclass(frozen=True)
class GeneratedAnswers(Measure):
    """Agreement of generated answers with the expected ones, and their latency."""

    supports_inside: ClassVar[bool] = True
    asks: ClassVar[bool] = True

    def measure(self, bench: ModelContext, cell: Cell, tokens_per_byte: float | None) -> Row:
        reader = ConversationReader.of(bench, cell, tokens_per_byte)
        scorer = GeneratedAnswerScorer()
        items = ask_all(reader, cell.task, scorer)
        figures = reader.figures()
        peak = max(figures["peak_kv_bytes"], *(answer.held_bytes for answer in scorer.answers))
        return figures | {"peak_kv_bytes": peak, "latency": scorer.latency(), "items": items}


@dataclass
class GeneratedAnswerScorer:
    """Scorer of generated answers that records their latency."""

    answers: list[TimedAnswer] = field(default_factory=list)

    def ask(
        self, engine: Engine, memory: ConversationMemory, numbered: Sequence[NumberedQuestion]
    ) -> list[Row]:
        """Items of these questions."""
        items: list[Row] = []
        for one in numbered:
            answer = generate_timed(engine, memory, one.question)
            self.answers.append(answer)
            items += generated_items(one, answer.text)
        return items

    def latency(self) -> Row:
        """Percentiles of the seconds to the first token of an answer and between tokens."""
        first = [one.first_seconds for one in self.answers if one.first_seconds is not None]
        later = [seconds for one in self.answers for seconds in one.token_seconds]
        timings = {"first_token": first, "token": later}
        return {name: percentiles(seconds) for name, seconds in timings.items() if seconds}


Part = GeneratedAnswers


@dataclass(frozen=True)
class TimedAnswer:
    """Generated answer with its timings.

    Args:
        first_seconds: from the start of the question's prefill to the first token; None if the
            answer is empty.
        token_seconds: between two tokens.
        held_bytes: bytes of all caches during generation, as `Engine.ask` would hold them.
    """

    text: str
    first_seconds: float | None
    token_seconds: tuple[float, ...]
    held_bytes: int


def generate_timed(engine: Engine, memory: ConversationMemory, question: Question) -> TimedAnswer:
    """Answer greedily on a fork of the cache, which stays unchanged.

    Raises:
        InputError: the question is longer than the budget.
    """
    cache, _ = memory.activate_for(question.question)
    prompt = engine.tokenizer.encode_question_about(memory.conversation, question)
    check_prompt_fits(prompt, budget_tokens(memory.policy))
    longest = max(
        engine.tokenizer.count_tokens(answer) for answer in (question.answer, *question.others)
    )
    limits = StoppingCriteria(SPARE_ANSWER_TOKENS + 2 * longest, engine.stop_ids)
    fork, stamps = cache.fork(), list[float]()
    planner = decode_planner(engine.runtime, memory.policy, [fork])
    fork.reserve(len(prompt) + (limits.max_new_tokens if planner is None else 1))

    def record_time(row: int, token: int) -> bool:
        stamps.append(time.perf_counter())
        return True

    started = time.perf_counter()
    observe = no_observer if planner is None else planner.observer
    decoder = engine.loaded.decoder
    [ids] = generate(decoder, [fork], [prompt], SamplingParams(), limits, record_time, observe)
    text = engine.tokenizer.decode(ids).strip()
    token_seconds = tuple(later - sooner for sooner, later in zip(stamps, stamps[1:], strict=False))
    # Without a decode policy `Engine.ask` needs no fork, so the fork replaces the cache.
    not_held = cache.nbytes if planner is None else fork.shared_nbytes
    held = memory.caches.nbytes + fork.nbytes - not_held
    return TimedAnswer(text, stamps[0] - started if stamps else None, token_seconds, held)
