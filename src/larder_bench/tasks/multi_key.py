"""Needles among needles: many magic numbers, some of which are asked for.

Cheng-Ping Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?"
(2024), arXiv:2404.06654, section 3.1 (MK-NIAH). RULER asks for one key of a text; here several are
asked for, each in a question of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from larder.core.conversation import Conversation
from larder.core.errors import BadParameter
from larder_bench.datasets.haystack import (
    Haystack,
    Needle,
    draw_distinct,
    draw_key,
    draw_magic_number,
    draw_number,
    magic_line,
    place_needles,
)
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import Task

KIND = "multi_key"


@dataclass(frozen=True)
class MultiKey(Task):
    """Magic numbers of many things.

    Args:
        questions: number of numbers asked for.
        keys: numbers in the haystack; None for a text of nothing but such numbers.
        hay: source of the haystack.
    """

    questions: int = 8
    keys: int | None = None
    hay: Haystack = Haystack.TALK

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise BadParameter(f"multi_key.questions must be 1 or more, got {self.questions}.")
        if self.keys is not None and self.keys < self.questions:
            raise BadParameter(
                f"multi_key.keys must be {self.questions} or more, as many as questions, got "
                f"{self.keys}."
            )

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random = Random(seed)
        drawn = draw_distinct(
            draw_magic_number, sources.grammar, random, self.keys or self.questions
        )
        needles = [self._with_question(number, needle) for number, needle in enumerate(drawn)]
        sentences = self.hay.sentences(sources, random)
        if self.keys is None:
            sentences = _distractors(drawn, sources, random)
        name = f"{KIND}-{tokens}-{seed}"
        return place_needles(name, needles, sentences, random, sources.count_tokens, tokens)

    def _with_question(self, number: int, needle: Needle) -> Needle:
        """Needle with a question if it is one of the first; the others are distractors."""
        if needle.question is None or number >= self.questions:
            return replace(needle, question=None)
        return replace(needle, question=replace(needle.question, kind=KIND))


def _distractors(needles: list[Needle], sources: TaskSources, random: Random) -> Iterator[str]:
    """Endless numbers of other things."""
    names = {name for needle in needles for name in needle.names}
    while True:
        key = draw_key(sources.grammar, random)
        if key not in names:
            names.add(key)
            yield magic_line(key, draw_number(random))


Part = MultiKey
