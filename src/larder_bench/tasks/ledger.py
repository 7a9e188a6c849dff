"""Ledgers: people give amounts to each other, step by step; the answer recomputes all steps.

No paper: long generation that can be checked. Every step of an answer needs one passage of the
context and the latest balances of two people in the answer itself; each is scored separately, given
the right steps before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import ClassVar

from larder.core import BadParameter, Conversation, Message, Question
from larder_bench.datasets.grammar import Grammar
from larder_bench.datasets.lifelog_sessions import count_message_tokens
from larder_bench.datasets.sources import TaskSources
from larder_bench.scoring.answer_items import numbered_item_spans
from larder_bench.tasks.base import BenchTask, QuestionStyle

KIND = "ledger"
FIRST = (10, 60)
GIFT = (1, 9)


@dataclass(frozen=True)
class LedgerTask(BenchTask):
    """Ledgers, as many as fit, with small talk in the remaining space.

    Args:
        steps: steps of each ledger.
        people: people in each ledger.
    """

    style: ClassVar[QuestionStyle] = QuestionStyle.RECITAL
    steps: int = 16
    people: int = 4

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise BadParameter(f"ledger.steps must be 1 or more, got {self.steps}.")
        if self.people < 2:
            raise BadParameter(f"ledger.people must be 2 or more, got {self.people}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random, left = Random(seed), tokens
        pairs, questions = list[list[Message]](), list[Question]()
        for text, question in self._ledgers(sources.grammar, random):
            pair = _answered(text, sources.grammar, random)
            if (taken := count_message_tokens(pair, sources.count_tokens)) > left:
                break
            left -= taken
            pairs.append(pair)
            questions.append(question)
        if not questions:
            raise BadParameter(
                f"ledger.tokens must hold a ledger of {self.steps} steps, got {tokens}: take "
                "fewer steps or more tokens."
            )
        for pair in _small_talk(left, sources, random):
            pairs.insert(random.randint(0, len(pairs)), pair)
        messages = tuple(message for pair in pairs for message in pair)
        shuffled = tuple(random.sample(questions, len(questions)))
        return Conversation(f"{KIND}-{tokens}-{seed}", messages, shuffled)

    def _ledgers(self, grammar: Grammar, random: Random) -> Iterator[tuple[str, Question]]:
        """Endless ledgers, numbered from 1, each with its question."""
        for number in count(1):
            names = random.sample(grammar.words["first"], self.people)
            balances = {name: random.randint(*FIRST) for name in names}
            start = ", ".join(f"{name} has {amount}" for name, amount in balances.items())
            lines, results = [f"Ledger {number}: {start}."], list[str]()
            for step in range(1, self.steps + 1):
                giver, taker, gift = _gift(balances, random)
                balances[giver] -= gift
                balances[taker] += gift
                lines.append(f"Step {step}: {giver} gives {gift} to {taker}.")
                results.append(f"{step}: {giver} {balances[giver]}, {taker} {balances[taker]}.")
            who = random.choice(names)
            answer = " ".join([*results, f"Answer: {balances[who]}"])
            question = f"How much does {who} have in ledger {number}? Work step by step."
            yield (
                " ".join(lines),
                Question(question, answer, KIND, items=numbered_item_spans(answer)),
            )


def _gift(balances: dict[str, int], random: Random) -> tuple[str, str, int]:
    """Giver, taker and amount; nobody gives more than they have."""
    giver = random.choice([name for name, amount in balances.items() if amount >= GIFT[0]])
    taker = random.choice([name for name in balances if name != giver])
    return giver, taker, random.randint(GIFT[0], min(GIFT[1], balances[giver]))


def _small_talk(left: int, sources: TaskSources, random: Random) -> Iterator[list[Message]]:
    for sentence in sources.sentences_of_small_talk(random):
        pair = _answered(sentence, sources.grammar, random)
        left -= count_message_tokens(pair, sources.count_tokens)
        if left < 0:
            return
        yield pair


def _answered(text: str, grammar: Grammar, random: Random) -> list[Message]:
    answer = random.choice(grammar.acknowledgements)
    return [Message("user", text), Message("assistant", answer)]


Part = LedgerTask
