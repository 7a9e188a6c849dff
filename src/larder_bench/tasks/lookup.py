"""Look-up: lines of a name and its value, and questions for some of the names.

Yucheng Li et al., "SCBench: A KV Cache-Centric Analysis of Long-Context Methods" (2024),
arXiv:2412.10319, section 3 (Retr.KV). Names are invented and values short codes instead of the
paper's UUIDs in JSON; the wording is the one that the bundled seed model was trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from larder.core.conversation import Conversation, Message, Question
from larder.core.errors import BadParameter
from larder_bench.datasets.grammar import Grammar, draw_value
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS, relative_depth
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import Task

NOTED = "Noted."


@dataclass(frozen=True)
class Lookup(Task):
    """As many lines as fit.

    Args:
        questions: number of names asked for.
    """

    questions: int = 20

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise BadParameter(f"lookup.questions must be 1 or more, got {self.questions}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random, lines = Random(seed), dict[str, str]()
        left = tokens - sources.count_tokens(NOTED) - 2 * MESSAGE_MARKER_TOKENS
        for name, value in _pairs(sources.grammar, random):
            if name in lines:
                continue
            left -= sources.count_tokens(f" {name}: {value}.")
            if left < 0:
                break
            lines[name] = value
        if len(lines) < self.questions:
            raise BadParameter(
                f"lookup.questions is {self.questions}, but {tokens} tokens hold {len(lines)} "
                "lines: ask fewer, or write more tokens."
            )
        text = " ".join(f"{name}: {value}." for name, value in lines.items())
        messages = (Message("user", text), Message("assistant", NOTED))
        questions = tuple(
            _question(name, lines[name], messages)
            for name in random.sample(list(lines), self.questions)
        )
        return Conversation(f"lookup-{tokens}-{seed}", messages, questions)


def _question(name: str, value: str, messages: Sequence[Message]) -> Question:
    start = messages[0].content.index(f"{name}: {value}.")
    question = f"What is the value of {name}?"
    return Question(question, value, "lookup", relative_depth(messages, 0, start))


def _pairs(grammar: Grammar, random: Random) -> Iterator[tuple[str, str]]:
    while True:
        name, code = (draw_value(kind, grammar.words, random) for kind in ("brand", "code"))
        yield name, f"{code}{random.randint(10, 99)}"


Part = Lookup
