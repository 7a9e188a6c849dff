"""Common words: a long list of words and the question which few of them are frequent.

Cheng-Ping Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?"
(2024), arXiv:2404.06654, section 3.3 (common words extraction). Words are invented, and expected in
the order of their first appearance, so that one answer is right; each is scored separately. Numbers
that are not given are RULER's, or smaller ones in the bundled models' wording.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from larder.core import BadParameter, Conversation, Question
from larder_bench.datasets.grammar import draw_value
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS
from larder_bench.datasets.prompt_templates import PROMPTS, worded_text
from larder_bench.datasets.sources import TaskSources
from larder_bench.datasets.task_prompts import Wording
from larder_bench.scoring.answer_items import join_items
from larder_bench.tasks.base import BenchTask, QuestionStyle

KIND = "common_words"
NOTED = "Noted."
# Frequent words, their occurrences, occurrences of others.
SEED_NUMBERS, RULER_NUMBERS, RULER_SHORT = (4, 15, 2), (10, 30, 3), (10, 6, 1)
SHORT_TOKENS = 4096


@dataclass(frozen=True)
class CommonWords(BenchTask):
    """List of words, few of which are frequent.

    Args:
        common: number of frequent words; None for RULER's 10, and 4 in the wording `seed`.
        often: occurrences of each frequent word; None for RULER's 30 (6 below 4,096 tokens), and 15
            in the wording `seed`.
        seldom: occurrences of each other word; None for RULER's 3 (1 below 4,096 tokens), and 2 in
            the wording `seed`.
    """

    style: ClassVar[QuestionStyle] = QuestionStyle.RECITAL
    common: int | None = None
    often: int | None = None
    seldom: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise BadParameter(f"common_words.{name} must be 1 or more, got {value}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random, count = Random(seed), sources.count_tokens
        num_common, often, seldom = self._numbers(tokens, sources.wording)
        drawn = _words(sources, random)
        common = [next(drawn) for _ in range(num_common)]
        words = common * often
        prompt = PROMPTS[KIND].of(sources.wording)
        left = tokens - count(prompt.opening.strip()) - count(NOTED) - 2 * MESSAGE_MARKER_TOKENS
        left -= sum(count(f" {n}. {word}") for n, word in enumerate(words, start=1))
        if left < 0:
            raise BadParameter(
                f"common_words.tokens must hold {len(words)} words, got {tokens}: take fewer or "
                "less common words, or more tokens."
            )
        for word in drawn:
            more = [word] * seldom
            left -= sum(count(f" {n}. {word}") for n, _ in enumerate(more, start=len(words) + 1))
            if left < 0:
                break
            words += more
        random.shuffle(words)
        numbered = " ".join(f"{n}. {word}" for n, word in enumerate(words, start=1))
        answer, items = join_items(sorted(common, key=words.index))
        question = prompt.ask(Question("", answer, KIND, items=items), str(num_common))
        name = f"{KIND}-{tokens}-{seed}"
        return worded_text(name, numbered, [question], sources.wording, prompt.opening, NOTED)

    def _numbers(self, tokens: int, wording: Wording) -> tuple[int, int, int]:
        """Frequent words, their occurrences and those of others, for a length in tokens."""
        defaults = RULER_SHORT if tokens < SHORT_TOKENS else RULER_NUMBERS
        defaults = SEED_NUMBERS if wording is Wording.SEED else defaults
        given = (self.common, self.often, self.seldom)
        common, often, seldom = (
            default if one is None else one for one, default in zip(given, defaults, strict=True)
        )
        if often <= seldom:
            raise BadParameter(
                f"common_words.often must be more than seldom, {seldom}, got {often}."
            )
        return common, often, seldom


def _words(sources: TaskSources, random: Random) -> Iterator[str]:
    """Invented words without repetition."""
    seen = set[str]()
    while True:
        word = draw_value("brand", sources.grammar.words, random).lower()
        if word not in seen:
            seen.add(word)
            yield word


Part = CommonWords
