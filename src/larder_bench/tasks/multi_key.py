"""Needles among needles: many magic numbers, some of which are asked for.

Cheng-Ping Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?"
(2024), arXiv:2404.06654, section 3.1 (MK-NIAH). RULER asks for one key of a text; here several are
asked for, each in a question of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from larder.core import BadParameter, Conversation
from larder_bench.datasets.haystack import (
    Haystack,
    HaystackText,
    Needle,
    draw_distinct,
    draw_key,
    draw_magic_number,
    draw_number,
    magic_line,
)
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask

KIND = "multi_key"


@dataclass(frozen=True)
class MultiKey(BenchTask):
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
        distractors = [replace(needle, answer="") for needle in drawn[self.questions :]]
        haystack = HaystackText.of(sources, self.hay, random, tokens)
        if self.keys is None:
            haystack = replace(haystack, sentences=_distractors(drawn, sources, random))
        needles = [*drawn[: self.questions], *distractors]
        return haystack.conversation(f"{KIND}-{tokens}-{seed}", "niah_magic", needles, KIND)


def _distractors(needles: list[Needle], sources: TaskSources, random: Random) -> Iterator[str]:
    """Endless numbers of other things."""
    names = {name for needle in needles for name in needle.names}
    while True:
        key = draw_key(sources.grammar, random)
        if key not in names:
            names.add(key)
            yield magic_line(key, draw_number(random))


Part = MultiKey
