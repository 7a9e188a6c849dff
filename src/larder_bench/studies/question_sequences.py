"""Put the questions of a conversation to a subject, sitting by sitting.

Each sitting has a fork of what was read. Within one, a question stands behind those before it with
their expected answers, so that all subjects go on from the same text whatever they would have said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from larder.core.conversation import Conversation, Question
from larder.core.memory_budget import MemoryBudget
from larder.core.types import Mode
from larder.engine.engine import Engine
from larder.models.forward_batch import BatchSegment as Tokens
from larder.session.caches import SessionCaches
from larder.session.memory import ConversationMemory
from larder.session.prefill import decode_planner
from larder_bench.results.budget_labels import MatchedQuantity
from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.scoring.item_scores import NumberedQuestion
from larder_bench.studies.cells import Cell
from larder_bench.studies.exhibits import exhibit_rows
from larder_bench.studies.methods import ComparedMethod, QuestionScope
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.size_matching import TargetSize, matched_bytes, row_figures
from larder_bench.tasks.base import QuestionStyle, Task


@runtime_checkable
class AnswerScorer(Protocol):
    """Answering mode that leaves the memory unchanged."""

    def ask(
        self, engine: Engine, memory: ConversationMemory, posed: Sequence[NumberedQuestion]
    ) -> list[Row]:
        """The items of all these questions, each asked on a fork."""
        ...


@dataclass
class ContextReader:
    """A conversation as one subject reads it, at one size, as often as it must.

    Args:
        amount: None where there is nothing to choose.
        guess: tokens per byte, where an earlier reading has told.
        is_shown: whether exhibits are taken of the first reading.
    """

    bench: ModelContext
    subject: ComparedMethod
    conversation: Conversation
    amount: MemoryBudget | None
    matched: MatchedQuantity
    guess: float | None = None
    is_shown: bool = False
    _figures: list[Row] = field(default_factory=list)
    _tries: int = 0

    @staticmethod
    def of(bench: ModelContext, cell: Cell, guess: float | None) -> ContextReader:
        """The conversation of a cell, as its subject reads it at its budget."""
        conversation = bench.conversation(cell.task, cell.seed, cell.tokens)
        told = cell.amount, cell.matched, guess
        return ContextReader(bench, cell.subject, conversation, *told, is_shown=cell.is_shown)

    def read(self, question: Question) -> ConversationMemory:
        """Read, with that question in mind where the subject wants to know one."""

        def under(tokens: int | None) -> ConversationMemory:
            self._tries += 1
            return self.subject.read(self.bench, self.conversation, tokens, question)

        if self.amount is None:
            memory = under(None)
        else:
            spec = self.bench.engine.loaded.decoder.spec
            context = len(self.bench.engine.tokenizer.encode_conversation(self.conversation).ids)
            matched = self.subject.matched(self.matched)
            found = TargetSize(self.amount, matched, context, spec).read(under, self.guess)
            memory = found.made
            self.guess = found.tokens / max(1, matched_bytes(matched)(memory.figures))
        figures = row_figures(memory.figures)
        if self.is_shown and not self._figures:
            figures[EXHIBITS_KEY] = exhibit_rows(memory)
        self._figures.append(figures)
        return memory

    def figures(self) -> Row:
        """Of the first reading, with its exhibits; seconds are the mean of all that were used."""
        seconds = [row["prefill_seconds"] for row in self._figures]
        mean = round(sum(seconds) / len(seconds), 3)
        return self._figures[0] | {"prefill_seconds": mean, "reads": self._tries}


def ask_all(readings: ContextReader, task: Task, asker: AnswerScorer) -> list[Row]:
    """The items of all questions of a conversation."""
    engine, asked = readings.bench.engine, list[Row]()
    sittings = number_questions(task, readings.conversation)
    scope = readings.subject.scope
    if scope is QuestionScope.FIRST and task.style in (
        QuestionStyle.INDEPENDENT,
        QuestionStyle.RECITAL,
    ):
        scope = QuestionScope.EACH
    if scope is QuestionScope.EACH:
        for sitting in sittings:
            for one in sitting:
                memory = readings.read(one.question)
                _append_turns(engine, memory, [before.question for before in sitting[: one.turn]])
                asked += asker.ask(engine, memory, [one])
        return asked
    memory = readings.read(sittings[0][0].question)
    for together in _batches(sittings):
        if len(together) > 1 or len(together[0]) == 1:
            asked += asker.ask(engine, memory, [sitting[0] for sitting in together])
        else:
            asked += _ask_in_turns(engine, memory, together[0], asker)
    return asked


def number_questions(task: Task, conversation: Conversation) -> list[list[NumberedQuestion]]:
    """The questions in their sittings and turns."""
    made, number = list[list[NumberedQuestion]](), 0
    for sitting in task.sittings(conversation.questions):
        made.append(
            [NumberedQuestion(one, number + turn, turn) for turn, one in enumerate(sitting)]
        )
        number += len(sitting)
    return made


def _batches(sittings: Sequence[list[NumberedQuestion]]) -> Iterator[list[list[NumberedQuestion]]]:
    """Sittings of one question in one go, each longer one by itself."""
    single = [sitting for sitting in sittings if len(sitting) == 1]
    if single:
        yield single
    yield from ([sitting] for sitting in sittings if len(sitting) > 1)


def _ask_in_turns(
    engine: Engine,
    memory: ConversationMemory,
    sitting: Sequence[NumberedQuestion],
    asker: AnswerScorer,
) -> list[Row]:
    memory, asked = fork_memory(engine, memory), list[Row]()
    for one in sitting:
        asked += asker.ask(engine, memory, [one])
        _append_turns(engine, memory, [one.question])
    return asked


def fork_memory(engine: Engine, memory: ConversationMemory) -> ConversationMemory:
    """Copy of a memory with its own caches."""
    numbers = range(len(memory.caches))
    caches = [memory.caches.activate(number).fork() for number in numbers]
    return replace(memory, caches=SessionCaches(engine.loaded.decoder.spec, caches))


def _append_turns(
    engine: Engine, memory: ConversationMemory, questions: Sequence[Question]
) -> None:
    """Have the caches that answer hold questions and expected answers for good."""
    scribe, decoder = engine.tokenizer, engine.loaded.decoder
    for question in questions:
        cache, _ = memory.activate_for(question.question)
        wrapped = memory.conversation.question_prompt.format(question=question.question)
        tending = decode_planner(engine.runtime, memory.policy, [cache])
        answer = scribe.encode_answer(question.answer)
        for ids, said in ((scribe.encode_question(wrapped), 0), (answer, len(answer))):
            row = Tokens(cache, ids)
            observer = None if tending is None else tending.observer([0], [row], [said])
            decoder.read([row], Mode.APPEND, observer)
