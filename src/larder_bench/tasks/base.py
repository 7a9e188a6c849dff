"""Base of benchmark tasks: a conversation with questions, generated from a seed.

Tasks are a family like the parts of a policy: each file in `larder_bench/tasks` is a task, and the
file name is its public name. They are spelled like parts, `needles(kind="magic", needles=8)`; third
parties add theirs through the entry point group `larder.task`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import ClassVar

from larder.core import (
    BadParameter,
    Conversation,
    Family,
    Question,
    SpellingError,
    TooLittle,
    build,
    parse,
)
from larder_bench.datasets.sources import TaskSources

QuestionSequence = tuple[Question, ...]
TASKS = Family("task", "larder_bench.tasks", listing="`larder bench`")
SEEDS_PER_CONVERSATION = 1000  # reserved, so that no two conversations share a seed
MAX_RETRIES = 100  # seeds tried per conversation


class QuestionStyle(Enum):
    """Mode in which the questions of a task are asked.

    INDEPENDENT: each on a fork of the context's caches.
    TURNS: one after the other in one sequence; each sees the questions and answers before it.
    REQUESTS: several sequences of one or more turns, each on a fork of the shared context.
    RECITAL: as INDEPENDENT; answers are long and scored item by item (`Question.items`).

    In TURNS and REQUESTS a policy that scores by the question sees only the first one.
    """

    INDEPENDENT = "independent"
    TURNS = "turns"
    REQUESTS = "requests"
    RECITAL = "recital"


class BenchTask(ABC):
    """Generator of conversations whose questions their text answers; a frozen dataclass.

    Equal tasks, seeds, lengths and sources make equal conversations.
    """

    style: ClassVar[QuestionStyle] = QuestionStyle.INDEPENDENT

    @abstractmethod
    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        """Conversation of at most `tokens` tokens, and of nearly as many if the task can generate
        them. Markers around messages count; a template's prefix before the first message does
        not.

        Raises:
            BadParameter: the questions do not fit, or there is nothing to ask.
            UsageError: a source that the task needs was not given.
            InputError: a source cannot be read.
        """

    def question_sequences(self, questions: QuestionSequence) -> tuple[QuestionSequence, ...]:
        """Questions in the sequences in which they are asked: each sequence on a fork of the
        context, each question after the answers to those before it.
        """
        return tuple((question,) for question in questions)


def parse_task(sentence: str) -> BenchTask:
    """Task of a spelling.

    Raises:
        SpellingError: the text does not parse, or is more than one part.
        UnknownName: the task or a parameter does not exist.
        BadParameter: a value is out of range.
    """
    calls = parse(sentence, "task")
    if len(calls) > 1:
        raise SpellingError(f"{sentence!r} is not one task: write name(parameter=value).")
    return build(TASKS.load(calls[0].name), calls[0].parameters)


def parse_inner_task(name: str, sentence: str) -> BenchTask:
    """Task whose questions the task `name` asks in its own style.

    Raises:
        BadParameter: that task has a style of its own; see also `parse_task`.
    """
    task = parse_task(sentence)
    if task.style in (QuestionStyle.TURNS, QuestionStyle.REQUESTS):
        raise BadParameter(
            f"{name}.of must be a task with independent questions, got {sentence}, whose style is "
            f"{task.style.value}."
        )
    return task


def make_with_retries(
    name: str, seed: int, tokens: int, make: Callable[[int], Conversation]
) -> Conversation:
    """Conversation of the first of its reserved seeds that yields enough questions.

    Raises:
        TooLittle: no seed does.
    """
    return _first_sufficient(
        f"{name}-{tokens}-{seed}",
        range(seed * SEEDS_PER_CONVERSATION, seed * SEEDS_PER_CONVERSATION + MAX_RETRIES),
        make,
    )


def make_with_seed_retries(
    seed: int, tokens: int, make: Callable[[int], Conversation]
) -> Conversation:
    """Conversation of the seed itself, or else of the first later seed that yields enough
    questions.

    All tried seeds select the same file of a data set of ten files.

    Raises:
        TooLittle: no seed does.
    """
    return _first_sufficient(
        f"only-{tokens}-{seed}",
        range(seed, seed + MAX_RETRIES * SEEDS_PER_CONVERSATION, SEEDS_PER_CONVERSATION),
        make,
    )


def _first_sufficient(name: str, seeds: range, make: Callable[[int], Conversation]) -> Conversation:
    for candidate in seeds[:-1]:
        try:
            return replace(make(candidate), name=name)
        except TooLittle:
            continue
    return make(seeds[-1])
