"""Cost of a long conversation: stages of its prefill, then turns.

M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 4.3, table 3: embedding and
clustering once, one prefill per episode, and at every turn matching the episode, fetching its cache
if the topic has changed, and decoding. Some turns are timed, and the cost of a turn is given for a
stated number of turns: one-time costs are divided among all turns, a fetch among those of one
topic. For comparison, a turn without prefix caching repeats the whole prefill.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from jaxtyping import Float32

from larder.core import BadParameter, Mode, Question, UsageError, require_at_least
from larder.engine import Engine
from larder.models import BatchSegment as Tokens
from larder.session import ConversationMemory, Embedder, decode_planner
from larder_bench.measures.base import Measure
from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.studies.cells import Cell
from larder_bench.studies.methods import PolicyMethod, QuestionScope
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.question_sequences import ConversationReader
from larder_bench.studies.target_size import row_figures

T = TypeVar("T")


@dataclass(frozen=True)
class Stages(Measure):
    """Seconds by stage.

    Args:
        turns: number of turns that one-time costs are divided among; the paper has 300.
        stays: turns of one topic until another cache is fetched; the paper has 300 in 90.
        timed: number of timed turns.
        answer: number of generated tokens in each.
    """

    turns: int = 300
    stays: float = 10 / 3
    timed: int = 6
    answer: int = 16

    def __post_init__(self) -> None:
        require_at_least(1, "stages", turns=self.turns, timed=self.timed, answer=self.answer)
        if self.stays < 1:
            raise BadParameter(f"stages.stays must be at least 1, got {self.stays}.")

    def measure(self, bench: ModelContext, cell: Cell, tokens_per_byte: float | None) -> Row:
        if (
            not isinstance(cell.subject, PolicyMethod)
            or cell.subject.scope is not QuestionScope.CONTEXT
        ):
            raise UsageError(
                f"{cell.subject.name} needs a prefill for each question, but stages has one "
                "prefill for many turns: leave it out."
            )
        reader = ConversationReader.of(bench, replace(cell, has_exhibits=False), tokens_per_byte)
        questions = reader.conversation.questions
        if not questions:
            name = reader.conversation.name
            raise UsageError(f"{name} has no questions to time turns with: take a task that asks.")
        memory = reader.read(questions[0])
        once = _time_clustering(bench.engine, memory)
        turns = [
            _time_turn(bench.engine, memory, questions[index % len(questions)], self.answer)
            for index in range(self.timed)
        ]
        each = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
        each["retrieve"] = _time_cache_fetch(memory)
        return row_figures(memory.figures) | self._stage_fields(memory, once, each)

    def _stage_fields(self, memory: ConversationMemory, once: Row, each: Row) -> Row:
        """Fields of the stages and of the cost of a turn."""
        prefill = max(0.0, memory.figures.prefill_seconds - sum(once.values()))
        setup = once | {"prefill": prefill}
        parts = {name: seconds / self.turns for name, seconds in setup.items()}
        parts |= {
            "match": each["match"],
            "retrieve": each["retrieve"] / self.stays,
            "decode": each["decode"],
        }
        breakdown = [{"name": name, "p50": part, "p95": part} for name, part in parts.items()]
        every = setup | each
        return {
            **{f"{name}_seconds": round(stage, 6) for name, stage in every.items()},
            "turn_seconds": round(sum(parts.values()), 6),
            "uncached_turn_seconds": round(prefill + each["decode"], 6),
            "items": [],
            EXHIBITS_KEY: [{"row": "breakdown", "step": "turn", "parts": breakdown}],
        }


@dataclass
class _TimedEmbedder(Embedder):
    """Embedder that records its time."""

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
    """Seconds of embedding and clustering, repeated on their own."""
    embedders: dict[str, _TimedEmbedder] = {}

    def clocked(name: str) -> Embedder:
        return embedders.setdefault(name, _TimedEmbedder(engine.runtime.embedder(name)))

    runtime = replace(engine.runtime, embedder=clocked)
    _, seconds = _time_call(
        lambda: memory.policy.session.build_router(
            memory.conversation, runtime.embedder, runtime.tokenizer.count_tokens
        )
    )
    embedded = float(sum(sum(one.seconds) for one in embedders.values()))
    return {"embed": embedded, "cluster": seconds - embedded if embedders else 0.0}


def _time_turn(engine: Engine, memory: ConversationMemory, question: Question, answer: int) -> Row:
    """Seconds of matching the cache, and of reading the question and answering."""
    _, match = _time_call(lambda: memory.router.route(question.question))
    cache, _ = memory.activate_for(question.question)
    prompt = engine.tokenizer.encode_question_about(memory.conversation, question)
    fork, decoder = cache.fork(), engine.loaded.decoder
    fork.reserve(len(prompt) + answer)
    planner = decode_planner(engine.runtime, memory.policy, [fork])

    def decode() -> None:
        ids = prompt
        for generated in range(answer):
            segment = Tokens(fork, ids)
            observer = None if planner is None else planner.observer([0], [segment], [generated])
            logits = decoder.forward_logits([segment], Mode.APPEND, [len(ids) - 1], observer)
            ids = (int(logits.argmax()),)

    return {"match": match, "decode": _time_call(decode)[1]}


def _time_cache_fetch(memory: ConversationMemory) -> float:
    """Median seconds of writing one cache back and activating another; 0 with a single cache."""
    caches = memory.caches
    if len(caches) < 2:
        return 0.0
    caches.activate(0)
    return statistics.median(
        _time_call(lambda number=number: caches.activate(number))[1] for number in (1, 0, 1)
    )


def _time_call(work: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


Part = Stages
