"""Scoring of a conversation's questions under a method, sequence by sequence.

Each sequence of questions gets a fork of the caches. Within a sequence, a question follows the ones
before it with their expected answers, so that all methods continue from the same text, whatever
they would have answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from larder.core import Conversation, MemoryBudget, Mode, PromptLayout, Question
from larder.engine import Engine
from larder.models import BatchSegment as Tokens
from larder.session import ConversationMemory, SessionCaches, decode_planner
from larder_bench.datasets.task_prompts import QuestionPlacement
from larder_bench.results.budget_labels import MatchedQuantity
from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.scoring.item_scores import NumberedQuestion
from larder_bench.studies.cells import Cell
from larder_bench.studies.exhibits import exhibit_rows
from larder_bench.studies.methods import ComparedMethod, QuestionScope
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.target_size import TargetSize, matched_bytes, row_figures
from larder_bench.tasks.base import BenchTask, QuestionStyle


@runtime_checkable
class AnswerScorer(Protocol):
    """Scorer of answers that leaves the memory unchanged."""

    def ask(
        self, engine: Engine, memory: ConversationMemory, numbered: Sequence[NumberedQuestion]
    ) -> list[Row]:
        """Items of these questions, each answered on a fork."""
        ...


@dataclass
class ConversationReader:
    """Conversation as one method reads it at one size, as often as necessary.

    Args:
        amount: budget; None if there is nothing to choose.
        tokens_per_byte: of an earlier prefill, if known.
        takes_exhibits: whether exhibits are taken of the first prefill.
        placement: place of the questions.
    """

    bench: ModelContext
    subject: ComparedMethod
    conversation: Conversation
    amount: MemoryBudget | None
    matched: MatchedQuantity
    tokens_per_byte: float | None = None
    takes_exhibits: bool = False
    placement: QuestionPlacement = QuestionPlacement.AFTER
    _figures: list[Row] = field(default_factory=list)
    _tries: int = 0

    @staticmethod
    def of(bench: ModelContext, cell: Cell, tokens_per_byte: float | None) -> ConversationReader:
        """Reader of a cell's conversation."""
        conversation = bench.conversation(cell.task, cell.seed, cell.tokens)
        return ConversationReader(
            bench=bench,
            subject=cell.subject,
            conversation=conversation,
            amount=cell.amount,
            matched=cell.matched,
            tokens_per_byte=tokens_per_byte,
            takes_exhibits=cell.has_exhibits,
            placement=cell.question,
        )

    def read(self, question: Question, first: Question | None = None) -> ConversationMemory:
        """Read the conversation; methods that need a question in advance get this one.

        Args:
            first: first question of the sequence, which ends the conversation if questions are
                inside; None if it is the same.
        """
        conversation = self.conversation
        if self.placement is QuestionPlacement.INSIDE:
            conversation = replace(conversation, inside=first or question)

        def under(tokens: int | None) -> ConversationMemory:
            self._tries += 1
            return self.subject.read(self.bench, conversation, tokens, question)

        if self.amount is None:
            memory = under(None)
        else:
            spec = self.bench.engine.loaded.decoder.spec
            context = len(self.bench.engine.tokenizer.encode_conversation(conversation).ids)
            matched = self.subject.matched(self.matched)
            fit = TargetSize(self.amount, matched, context, spec).read(under, self.tokens_per_byte)
            memory = fit.result
            self.tokens_per_byte = fit.tokens / max(1, matched_bytes(matched)(memory.figures))
        figures = row_figures(memory.figures)
        if self.takes_exhibits and not self._figures:
            figures[EXHIBITS_KEY] = exhibit_rows(memory)
        self._figures.append(figures)
        return memory

    def figures(self) -> Row:
        """Figures and exhibits of the first prefill; seconds are the mean of all used ones."""
        seconds = [row["prefill_seconds"] for row in self._figures]
        mean = round(sum(seconds) / len(seconds), 3)
        return self._figures[0] | {"prefill_seconds": mean, "reads": self._tries}


def ask_all(reader: ConversationReader, task: BenchTask, scorer: AnswerScorer) -> list[Row]:
    """Items of all questions of a conversation."""
    engine, items = reader.bench.engine, list[Row]()
    sequences = number_questions(task, reader.conversation)
    if reads_each_question(reader.subject, task, reader.placement):
        for sequence in sequences:
            for one in sequence:
                memory = reader.read(one.question, sequence[0].question)
                before = [other.question for other in sequence[: one.turn]]
                items += scorer.ask(engine, _after_turns(engine, memory, before), [one])
        return items
    if reader.placement is QuestionPlacement.INSIDE:
        for sequence in sequences:
            memory = reader.read(sequence[0].question)
            items += _ask_in_turns(engine, memory, sequence, scorer)
        return items
    memory = reader.read(sequences[0][0].question)
    for batch in _batches(sequences):
        if len(batch) > 1 or len(batch[0]) == 1:
            items += scorer.ask(engine, memory, [sequence[0] for sequence in batch])
        else:
            items += _ask_in_turns(engine, memory, batch[0], scorer)
    return items


def reads_each_question(
    subject: ComparedMethod, task: BenchTask, placement: QuestionPlacement
) -> bool:
    """Test if a method reads the conversation again for each question."""
    if subject.scope is QuestionScope.CONTEXT and placement is QuestionPlacement.AFTER:
        return False
    independent = task.style in (QuestionStyle.INDEPENDENT, QuestionStyle.RECITAL)
    return independent or subject.scope is QuestionScope.EACH


def number_questions(task: BenchTask, conversation: Conversation) -> list[list[NumberedQuestion]]:
    """Questions of a conversation in sequences, numbered."""
    numbered, number = list[list[NumberedQuestion]](), 0
    for sequence in task.question_sequences(conversation.questions):
        numbered.append(
            [NumberedQuestion(one, number + turn, turn) for turn, one in enumerate(sequence)]
        )
        number += len(sequence)
    return numbered


def _batches(sequences: Sequence[list[NumberedQuestion]]) -> Iterator[list[list[NumberedQuestion]]]:
    """Batches: all sequences of one question together, each longer sequence alone."""
    single = [sequence for sequence in sequences if len(sequence) == 1]
    if single:
        yield single
    yield from ([sequence] for sequence in sequences if len(sequence) > 1)


def _ask_in_turns(
    engine: Engine,
    memory: ConversationMemory,
    sequence: Sequence[NumberedQuestion],
    scorer: AnswerScorer,
) -> list[Row]:
    memory, items = fork_memory(engine, memory), list[Row]()
    for one in sequence:
        items += scorer.ask(engine, memory, [one])
        memory = _after_turns(engine, memory, [one.question])
    return items


def fork_memory(engine: Engine, memory: ConversationMemory) -> ConversationMemory:
    """Copy of a memory with its own caches."""
    numbers = range(len(memory.caches))
    caches = [memory.caches.activate(number).fork() for number in numbers]
    return replace(memory, caches=SessionCaches(engine.loaded.decoder.spec, caches))


def _after_turns(
    engine: Engine, memory: ConversationMemory, questions: Sequence[Question]
) -> ConversationMemory:
    """Memory after questions and expected answers, which are appended to its caches in place."""
    tokenizer, decoder = engine.tokenizer, engine.loaded.decoder
    for question in questions:
        cache, _ = memory.activate_for(question.question)
        planner = decode_planner(engine.runtime, memory.policy, [cache])
        prompt = tokenizer.encode_question_about(memory.conversation, question)
        answer = tokenizer.encode_answer_about(memory.conversation, question)
        for ids, generated in ((prompt, 0), (answer, len(answer))):
            segment = Tokens(cache, ids)
            observer = None if planner is None else planner.observer([0], [segment], [generated])
            decoder.read([segment], Mode.APPEND, observer)
        memory = replace(memory, conversation=_after_turn(memory.conversation))
    return memory


def _after_turn(conversation: Conversation) -> Conversation:
    """Conversation whose next question begins a turn of its own."""
    if conversation.form is not PromptLayout.SINGLE_TURN:
        return replace(conversation, inside=None)
    prompt = conversation.question_prompt.lstrip("\n")  # it parted question and text
    return replace(conversation, form=PromptLayout.DOCUMENT, question_prompt=prompt, inside=None)
