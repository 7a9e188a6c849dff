"""Base of benchmark tasks: a conversation with questions, generated from a seed.

Tasks are a family as the parts of a policy are: a file in `bench/tasks` is a task, and its name the
public one. They are written as parts are, `needles(kind="magic", needles=8)`; third parties add
theirs through the entry point group `larder.task`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import ClassVar

from larder.core.conversation import Conversation, Question
from larder.core.errors import BadParameter, SpellingError, TooLittle
from larder.core.family import Family
from larder.core.spelling import build, parse
from larder_bench.datasets.sources import TaskSources

QuestionSequence = tuple[Question, ...]


class QuestionStyle(Enum):
    """Mode in which the questions of a task are asked.

    INDEPENDENT: each on a fork of what was read.
    TURNS: one after the other in one sitting; each sees the questions and answers before it.
    REQUESTS: several sittings that share what was read, each of one or more turns on a fork of it.
    RECITAL: as INDEPENDENT; answers are long and scored item by item (`Question.items`).

    In TURNS and REQUESTS a policy that looks at a question before it reads sees the first one only.
    """

    INDEPENDENT = "independent"
    TURNS = "turns"
    REQUESTS = "requests"
    RECITAL = "recital"


class Task(ABC):
    """A frozen dataclass that makes conversations whose answers stand in them or follow from them.

    Equal tasks, seeds, lengths and sources make equal conversations.
    """

    style: ClassVar[QuestionStyle] = QuestionStyle.INDEPENDENT

    @abstractmethod
    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        """A conversation of at most `tokens` tokens, and of little less where the task can make as
        much. Marks around messages count; what a template puts before the first does not.

        Raises:
            BadParameter: there is no room for what is asked, or nothing to ask.
            UsageError: a source that the task needs was not named.
            InputError: a source cannot be read.
        """

    def sittings(self, questions: QuestionSequence) -> tuple[QuestionSequence, ...]:
        """The questions as they are asked: each sitting on a fork of what was read, and in it each
        question behind the answers to those before.
        """
        return tuple((question,) for question in questions)


TASKS = Family("task", "larder_bench.tasks")


def parse_task(sentence: str) -> Task:
    """A task as it is written.

    Raises:
        SpellingError: it does not parse, or is more than one part.
        UnknownName: no such task or parameter.
        BadParameter: a value out of range.
    """
    calls = parse(sentence, "task")
    if len(calls) > 1:
        raise SpellingError(f"{sentence!r} is not one task: write name(parameter=value).")
    return build(TASKS.load(calls[0].name), calls[0].parameters)


def parse_inner_task(name: str, sentence: str) -> Task:
    """A task whose questions another one, `name`, asks in its own way.

    Raises:
        BadParameter: that task has a way of its own, too; or see `parse_task`.
    """
    task = parse_task(sentence)
    if task.style in (QuestionStyle.TURNS, QuestionStyle.REQUESTS):
        raise BadParameter(
            f"{name}.of must be a task whose questions stand alone, got {sentence}: it is itself "
            f"one of {task.style.value}."
        )
    return task


SEEDS_PER_CONVERSATION = 1000  # kept for one conversation, so that no two share one
MAX_RETRIES = 100  # of these


def make_with_retries(
    name: str, seed: int, tokens: int, make: Callable[[int], Conversation]
) -> Conversation:
    """The conversation under the first of its own seeds that gives enough to ask.

    Raises:
        TooLittle: none does.
    """
    return _first_sufficient(
        f"{name}-{tokens}-{seed}",
        range(seed * SEEDS_PER_CONVERSATION, seed * SEEDS_PER_CONVERSATION + MAX_RETRIES),
        make,
    )


def make_with_seed_retries(
    name: str, seed: int, tokens: int, make: Callable[[int], Conversation]
) -> Conversation:
    """The conversation under the seed itself, else under the first of some that gives enough.

    Of a data set of ten files all of these give the same one.

    Raises:
        TooLittle: none does.
    """
    return _first_sufficient(
        f"{name}-{tokens}-{seed}",
        range(seed, seed + MAX_RETRIES * SEEDS_PER_CONVERSATION, SEEDS_PER_CONVERSATION),
        make,
    )


def _first_sufficient(name: str, seeds: range, make: Callable[[int], Conversation]) -> Conversation:
    for own in seeds[:-1]:
        try:
            return replace(make(own), name=name)
        except TooLittle:
            continue
    return make(seeds[-1])
