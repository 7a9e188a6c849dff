"""Many requests: sequences of questions that share one context.

Yucheng Li et al., "SCBench: A KV Cache-Centric Analysis of Long-Context Methods" (2024),
arXiv:2412.10319, section 3 (multi-request mode). Entries that a cache evicts because the first
request does not need them are missing for the others. In the wording `instruct` the first question
of a request shares the message of the text, and later ones are messages of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from larder.core import BadParameter, Conversation
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask, QuestionSequence, QuestionStyle, parse_inner_task


@dataclass(frozen=True)
class Requests(BenchTask):
    """Sequences of equal length; the last one may be shorter.

    Args:
        of: spelling of the task whose conversations and questions are taken.
        turns: questions in each sequence.
    """

    style: ClassVar[QuestionStyle] = QuestionStyle.REQUESTS
    of: str = "lifelog(questions=12)"
    turns: int = 3

    def __post_init__(self) -> None:
        parse_inner_task("requests", self.of)
        if self.turns < 1:
            raise BadParameter(f"requests.turns must be 1 or more, got {self.turns}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        conversation = parse_inner_task("requests", self.of).make(seed, tokens, sources)
        return replace(conversation, name=f"requests-{tokens}-{seed}")

    def question_sequences(self, questions: QuestionSequence) -> tuple[QuestionSequence, ...]:
        starts = range(0, len(questions), self.turns)
        return tuple(questions[start : start + self.turns] for start in starts)


Part = Requests
