"""Common words: a long list of words and the question which few of them are frequent.

Cheng-Ping Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?"
(2024), arXiv:2404.06654, section 3.3 (common words extraction). Words are expected in the order of
their first appearance, so that one answer is right; each is scored separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from larder.core.conversation import Conversation, Question
from larder.core.errors import BadParameter
from larder_bench.datasets.grammar import draw_value
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS
from larder_bench.datasets.prompt_templates import PROMPTS, worded_text
from larder_bench.datasets.sources import TaskSources
from larder_bench.scoring.answer_items import join_items
from larder_bench.tasks.base import QuestionStyle, Task

KIND = "common_words"
NOTED = "Noted."


@dataclass(frozen=True)
class CommonWords(Task):
    """List of words, few of which are frequent.

    Args:
        common: number of frequent words.
        often: occurrences of each frequent word.
        seldom: occurrences of each other word.
    """

    style: ClassVar[QuestionStyle] = QuestionStyle.RECITAL
    common: int = 4
    often: int = 15
    seldom: int = 2

    def __post_init__(self) -> None:
        if self.common < 1:
            raise BadParameter(f"common_words.common must be 1 or more, got {self.common}.")
        if self.seldom < 1:
            raise BadParameter(f"common_words.seldom must be 1 or more, got {self.seldom}.")
        if self.often <= self.seldom:
            raise BadParameter(
                f"common_words.often must be more than seldom, {self.seldom}, got {self.often}."
            )

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random, count = Random(seed), sources.count_tokens
        drawn = _words(sources, random)
        common = [next(drawn) for _ in range(self.common)]
        words = common * self.often
        prompt = PROMPTS[KIND].of(sources.wording)
        left = tokens - count(prompt.opening.strip()) - count(NOTED) - 2 * MESSAGE_MARKER_TOKENS
        left -= sum(count(f" {n}. {word}") for n, word in enumerate(words, start=1))
        if left < 0:
            raise BadParameter(
                f"common_words.tokens must hold {len(words)} words, got {tokens}: take fewer or "
                "less common words, or more tokens."
            )
        for word in drawn:
            more = [word] * self.seldom
            left -= sum(count(f" {n}. {word}") for n, _ in enumerate(more, start=len(words) + 1))
            if left < 0:
                break
            words += more
        random.shuffle(words)
        numbered = " ".join(f"{n}. {word}" for n, word in enumerate(words, start=1))
        answer, items = join_items(sorted(common, key=words.index))
        question = prompt.ask(Question("", answer, KIND, items=items), str(self.common))
        name = f"{KIND}-{tokens}-{seed}"
        return worded_text(name, numbered, [question], sources.wording, prompt.opening, NOTED)


def _words(sources: TaskSources, random: Random) -> Iterator[str]:
    """Invented words without repetition."""
    seen = set[str]()
    while True:
        word = draw_value("brand", sources.grammar.words, random).lower()
        if word not in seen:
            seen.add(word)
            yield word


Part = CommonWords
