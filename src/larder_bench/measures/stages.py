"""Cost of a long conversation: stages of its prefill, then turns.

M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 4.3, table 3: embedding and
clustering once, one reading per episode, and at every turn finding the episode, fetching its cache
where the topic has changed, and decoding. Some turns are timed, and the cost of one is told for as
many as stated: what is done once is divided among them, a fetch among those of one topic. Beside
it stands a turn that reads everything anew, as where no prefix is kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from jaxtyping import Float32

from larder.core.conversation import Question
from larder.core.errors import BadParameter, UsageError
from larder.core.types import Mode
from larder.engine.engine import Engine
from larder.models.forward_batch import BatchSegment as Tokens
from larder.session.embedders.base import Embedder
from larder.session.memory import ConversationMemory
from larder.session.prefill import decode_planner
from larder_bench.measures.base import Measure
from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.studies.cells import Cell
from larder_bench.studies.methods import PolicyMethod, QuestionScope
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.question_sequences import ContextReader
from larder_bench.studies.size_matching import row_figures

T = TypeVar("T")


@dataclass(frozen=True)
class Stages(Measure):
    """Seconds by stage.

    Args:
        turns: that what is done once is divided among; the paper has 300.
        stays: turns of one topic, until another cache is fetched; the paper has 300 in 90.
        timed: turns that are really taken.
        answer: tokens that are generated in each.
    """

    turns: int = 300
    stays: float = 10 / 3
    timed: int = 6
    answer: int = 16

    def __post_init__(self) -> None:
        for name in ("turns", "timed", "answer"):
            if getattr(self, name) < 1:
                raise BadParameter(f"stages.{name} must be 1 or more, got {getattr(self, name)}.")
        if self.stays < 1:
            raise BadParameter(f"stages.stays must be 1 or more, got {self.stays}.")

    def measure(self, bench: ModelContext, cell: Cell, guess: float | None) -> Row:
        if (
            not isinstance(cell.subject, PolicyMethod)
            or cell.subject.scope is not QuestionScope.CONTEXT
        ):
            raise UsageError(
                f"{cell.subject.name} reads anew for each question, and stages has one reading for "
                "many turns: leave it out."
            )
        readings = ContextReader.of(bench, replace(cell, is_shown=False), guess)
        asked = readings.conversation.questions
        if not asked:
            name = readings.conversation.name
            raise UsageError(f"{name} has no questions to time turns with: take a task that asks.")
        memory = readings.read(asked[0])
        once = _time_clustering(bench.engine, memory)
        turns = [
            _time_turn(bench.engine, memory, asked[number % len(asked)], self.answer)
            for number in range(self.timed)
        ]
        each = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
        each["retrieve"] = _time_cache_fetch(memory)
        return row_figures(memory.figures) | self._told(memory, once, each)

    def _told(self, memory: ConversationMemory, once: Row, each: Row) -> Row:
        """The stages, and what they come to for a turn."""
        prefill = max(0.0, memory.figures.prefill_seconds - sum(once.values()))
        at_first = once | {"prefill": prefill}
        parts = {name: seconds / self.turns for name, seconds in at_first.items()}
        parts |= {
            "match": each["match"],
            "retrieve": each["retrieve"] / self.stays,
            "decode": each["decode"],
        }
        shown = [{"name": name, "p50": took, "p95": took} for name, took in parts.items()]
        every = at_first | each
        return {
            **{f"{name}_seconds": round(took, 6) for name, took in every.items()},
            "turn_seconds": round(sum(parts.values()), 6),
            "uncached_turn_seconds": round(prefill + each["decode"], 6),
            "items": [],
            EXHIBITS_KEY: [{"row": "breakdown", "step": "turn", "parts": shown}],
        }


@dataclass
class _TimedEmbedder(Embedder):
    """An embedder whose time is added up."""

    inner: Embedder
    seconds: list[float] = field(default_factory=list[float])

    @property
    def name(self) -> str:
        return self.inner.name

    def embed_segments(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        rows, seconds = _time_call(lambda: self.inner.embed_segments(texts))
        self.seconds.append(seconds)
        return rows

    def embed_questions(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        return self.inner.embed_questions(texts)


def _time_clustering(engine: Engine, memory: ConversationMemory) -> Row:
    """Seconds of stage 1, taken once more by itself: embedding, and clustering."""
    found: dict[str, _TimedEmbedder] = {}

    def clocked(name: str) -> Embedder:
        return found.setdefault(name, _TimedEmbedder(engine.runtime.embedder(name)))

    runtime = replace(engine.runtime, embedder=clocked)
    _, seconds = _time_call(
        lambda: memory.policy.session.build_router(
            memory.conversation, runtime.embedder, runtime.tokenizer.count_tokens
        )
    )
    embedded = float(sum(sum(one.seconds) for one in found.values()))
    return {"embed": embedded, "cluster": seconds - embedded if found else 0.0}


def _time_turn(engine: Engine, memory: ConversationMemory, question: Question, answer: int) -> Row:
    """Seconds of finding the cache, and of reading the question and answering."""
    _, match = _time_call(lambda: memory.router.route(question.question))
    cache, _ = memory.activate_for(question.question)
    prompt = engine.tokenizer.encode_question(
        memory.conversation.question_prompt.format(question=question.question)
    )
    fork, decoder = cache.fork(), engine.loaded.decoder
    fork.reserve(len(prompt) + answer)
    tending = decode_planner(engine.runtime, memory.policy, [fork])

    def decode() -> None:
        given = prompt
        for said in range(answer):
            row = Tokens(fork, given)
            observer = None if tending is None else tending.observer([0], [row], [said])
            logits = decoder.forward_logits([row], Mode.APPEND, [len(given) - 1], observer)
            given = (int(logits.argmax()),)

    return {"match": match, "decode": _time_call(decode)[1]}


def _time_cache_fetch(memory: ConversationMemory) -> float:
    """Seconds of writing one cache back and making another active; 0 of the only one."""
    shelf = memory.caches
    if len(shelf) < 2:
        return 0.0
    shelf.activate(0)
    return statistics.median(
        _time_call(lambda number=number: shelf.activate(number))[1] for number in (1, 0, 1)
    )


def _time_call(work: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    made = work()
    return made, time.perf_counter() - started


Part = Stages
