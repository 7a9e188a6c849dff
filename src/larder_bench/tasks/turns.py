"""Many turns: the questions of another task, asked one after the other in one sequence.

Yucheng Li et al., "SCBench: A KV Cache-Centric Analysis of Long-Context Methods" (2024),
arXiv:2412.10319, section 3 (multi-turn mode). Entries that a cache evicts because the first
question does not need them are missing for the later ones. In the wording `instruct` the first
question shares the message of the text, and later ones are messages of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from larder.core import Conversation
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask, QuestionSequence, QuestionStyle, parse_inner_task


@dataclass(frozen=True)
class TurnsTask(BenchTask):
    """Questions of a task in a single sequence.

    Args:
        of: spelling of the task whose conversations and questions are taken.
    """

    style: ClassVar[QuestionStyle] = QuestionStyle.TURNS
    of: str = "lifelog(questions=5)"

    def __post_init__(self) -> None:
        parse_inner_task("turns", self.of)

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        conversation = parse_inner_task("turns", self.of).make(seed, tokens, sources)
        return replace(conversation, name=f"turns-{tokens}-{seed}")

    def question_sequences(self, questions: QuestionSequence) -> tuple[QuestionSequence, ...]:
        return (questions,)


Part = TurnsTask
