"""Needles asked for together: one question names several things, whose numbers are far apart.

Cheng-Ping Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?"
(2024), arXiv:2404.06654, section 3.1 (MQ-NIAH). The numbers are expected in the order of the
question, and each is scored separately, given the right ones before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

from larder.core import BadParameter, Conversation, Question
from larder_bench.datasets.haystack import Haystack, HaystackText, draw_distinct, draw_magic_number
from larder_bench.datasets.prompt_templates import PROMPTS, PromptTemplate
from larder_bench.datasets.sources import TaskSources
from larder_bench.scoring.answer_items import join_items
from larder_bench.tasks.base import BenchTask, QuestionStyle

KIND = "multi_query"


@dataclass(frozen=True)
class MultiQuery(BenchTask):
    """Questions for several numbers each.

    Args:
        queries: numbers that a question asks for.
        questions: number of questions, about different numbers.
        hay: source of the haystack.
    """

    style: ClassVar[QuestionStyle] = QuestionStyle.RECITAL
    queries: int = 4
    questions: int = 3
    hay: Haystack = Haystack.TALK

    def __post_init__(self) -> None:
        if self.queries < 2:
            raise BadParameter(f"multi_query.queries must be 2 or more, got {self.queries}.")
        if self.questions < 1:
            raise BadParameter(f"multi_query.questions must be 1 or more, got {self.questions}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random = Random(seed)
        needles = draw_distinct(
            draw_magic_number, sources.grammar, random, self.queries * self.questions
        )
        haystack = HaystackText.of(sources, self.hay, random, tokens)
        conversation = haystack.conversation(f"{KIND}-{tokens}-{seed}", KIND, needles)
        numbers = {needle.subject: needle.answer for needle in needles}
        keys = random.sample(list(numbers), len(numbers))
        groups = (keys[start :: self.questions] for start in range(self.questions))
        prompt, scorer = PROMPTS[KIND].of(sources.wording), conversation.questions[0].scorer
        questions = tuple(_question(group, numbers, prompt, scorer) for group in groups)
        return replace(conversation, questions=questions)


def _question(
    keys: list[str], numbers: dict[str, str], prompt: PromptTemplate, scorer: str
) -> Question:
    names = f"{', '.join(keys[:-1])} and {keys[-1]}"
    answer, items = join_items([numbers[key] for key in keys])
    return prompt.ask(Question("", answer, KIND, items=items, scorer=scorer), names)


Part = MultiQuery
