"""Needles of one name: several magic numbers of the same thing, all of which are asked for.

Cheng-Ping Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?"
(2024), arXiv:2404.06654, section 3.1 (MV-NIAH). The numbers are expected in the order of the text,
and each is scored separately, given the right ones before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from larder.core import BadParameter, Conversation
from larder_bench.datasets.grammar import Grammar
from larder_bench.datasets.haystack import (
    Haystack,
    HaystackText,
    Needle,
    draw_distinct,
    draw_key,
    draw_number,
    magic_line,
)
from larder_bench.datasets.sources import TaskSources
from larder_bench.scoring.answer_items import join_items
from larder_bench.tasks.base import BenchTask, QuestionStyle

KIND = "multi_value"


@dataclass(frozen=True)
class MultiValue(BenchTask):
    """Things with several numbers.

    Args:
        keys: number of things, each with a question.
        values: numbers of each thing.
        hay: source of the haystack.
    """

    style: ClassVar[QuestionStyle] = QuestionStyle.RECITAL
    keys: int = 3
    values: int = 4
    hay: Haystack = Haystack.TALK

    def __post_init__(self) -> None:
        if self.keys < 1:
            raise BadParameter(f"multi_value.keys must be 1 or more, got {self.keys}.")
        if self.values < 1:
            raise BadParameter(f"multi_value.values must be 1 or more, got {self.values}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random = Random(seed)
        needles = draw_distinct(self._needle, sources.grammar, random, self.keys)
        haystack = HaystackText.of(sources, self.hay, random, tokens)
        return haystack.conversation(f"{KIND}-{tokens}-{seed}", KIND, needles)

    def _needle(self, grammar: Grammar, random: Random) -> Needle:
        key = draw_key(grammar, random)
        numbers = list(dict.fromkeys(draw_number(random) for _ in range(self.values)))
        lines = tuple(magic_line(key, number) for number in numbers)
        return Needle(lines, frozenset({key}), key, *join_items(numbers))


Part = MultiValue
