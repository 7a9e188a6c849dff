"""Recital: numbered reminders scattered in small talk, to be recited in order, item by item.

No paper: long generation that can be checked; each item needs one passage of the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from larder.core import BadParameter, Conversation, Message, Question
from larder_bench.datasets.grammar import Grammar, draw_value, load_grammar
from larder_bench.datasets.lifelog_sessions import count_message_tokens
from larder_bench.datasets.sources import TaskSources
from larder_bench.scoring.answer_items import numbered_item_spans
from larder_bench.tasks.base import BenchTask, QuestionStyle, make_with_retries

REMINDER_CHANCE = 0.4
KIND = "recite"


@dataclass(frozen=True)
class Recite(BenchTask):
    """Reminders to recite.

    Args:
        items: maximum number of items per question.
    """

    style: ClassVar[QuestionStyle] = QuestionStyle.RECITAL
    items: int = 60

    def __post_init__(self) -> None:
        if self.items < 1:
            raise BadParameter(f"recite.items must be 1 or more, got {self.items}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        def generate(retry_seed: int) -> Conversation:
            return recital_conversation(retry_seed, tokens, sources.count_tokens, self.items)

        return make_with_retries("recite", seed, tokens, generate)


Part = Recite


def recital_conversation(
    seed: int, tokens: int, count_tokens: Callable[[str], int], items: int = 60
) -> Conversation:
    """Small talk of at most `tokens` tokens with reminders; equal seeds give equal conversations.

    Args:
        seed: seed of all random choices.
        tokens: maximum number of tokens of the messages, markers between them included.
        count_tokens: returns the number of tokens of a text.
        items: maximum number of items per question; all reminders are asked for, in order. The
            seed model counts less reliably if a question does not start with the first.

    Raises:
        BadParameter: `items` is below 1, or no reminder fits.
    """
    if items < 1:
        raise BadParameter(f"recite.items must be 1 or more, got {items}.")
    random, grammar = Random(seed), load_grammar()
    messages, reminders = list[Message](), list[str]()
    for text, reminder in _talk(grammar, random, reminders):
        answer = random.choice(grammar.acknowledgements)
        pair = [Message("user", text), Message("assistant", answer)]
        tokens -= count_message_tokens(pair, count_tokens)
        if tokens < 0:
            break
        messages += pair
        reminders += reminder
    if not reminders:
        raise BadParameter("recite.tokens must hold a reminder: take 100 or more.")
    return Conversation(KIND, tuple(messages), tuple(_questions(reminders, items)))


def _talk(
    grammar: Grammar, random: Random, reminders: list[str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Endless user messages, each with its reminder, if any."""
    while True:
        topic = random.choice(grammar.topics)
        text, reminder = random.choice(topic.chat), ""
        if random.random() < REMINDER_CHANCE:
            entity, attribute = random.choice(topic.entities), random.choice(topic.attributes)
            value = draw_value(attribute.value_kind, grammar.words, random)
            statement = random.choice(attribute.statements)
            reminder = statement.replace("{E}", entity).replace("{V}", value)
            text += f" Reminder {len(reminders) + 1}: {reminder}."
        yield text, (reminder,) if reminder else ()


def _questions(reminders: list[str], most: int) -> Iterator[Question]:
    """Questions for runs of about equal length that together cover all reminders."""
    runs = -(-len(reminders) // most)
    cuts = [len(reminders) * run // runs for run in range(runs + 1)]
    for start, stop in zip(cuts, cuts[1:], strict=False):
        recited = (f"{n}: {text}." for n, text in enumerate(reminders[start:stop], start=start + 1))
        answer = " ".join(recited)
        question = f"Recite reminders {start + 1} to {stop}."
        yield Question(question, answer, KIND, items=numbered_item_spans(answer))
