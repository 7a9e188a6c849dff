"""Frequent words: coded words between dots, and the question which three come most often.

Cheng-Ping Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?"
(2024), arXiv:2404.06654, section 3.3 (frequent words extraction). Numbers of occurrences follow a
Zeta distribution over ranks; the word of the first rank is noise, "...", and the next three are the
answer, each of which is scored separately.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from string import ascii_lowercase
from typing import ClassVar

from larder.core import BadParameter, Conversation, Question
from larder.session import ACKNOWLEDGEMENT
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS
from larder_bench.datasets.prompt_templates import PROMPTS, worded_text
from larder_bench.datasets.sources import TaskSources
from larder_bench.scoring.answer_items import join_items
from larder_bench.tasks.base import BenchTask, QuestionStyle

KIND = "frequent_words"
NOISE = "..."
WORD_LETTERS = 6
ASKED = 3  # words; the published question names the number
TOKENS_PER_WORD = 50  # of the text, per word of the vocabulary, as in the released code


@dataclass(frozen=True)
class FrequentWords(BenchTask):
    """Coded words.

    Args:
        alpha: exponent of the distribution: the word of rank k comes k**-alpha times as often as
            the first; more than 1.
    """

    style: ClassVar[QuestionStyle] = QuestionStyle.RECITAL
    alpha: float = 2.0

    def __post_init__(self) -> None:
        if self.alpha <= 1:
            raise BadParameter(f"frequent_words.alpha must be more than 1, got {self.alpha}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random, count = Random(seed), sources.count_tokens
        prompt = PROMPTS[KIND].of(sources.wording)
        left = tokens - count(prompt.opening) - count(ACKNOWLEDGEMENT) - 2 * MESSAGE_MARKER_TOKENS
        vocabulary = _vocabulary(random, max(ASKED + 2, left // TOKENS_PER_WORD))
        costs = [count(f" {word}") for word in vocabulary]

        def tokens_of(first: int) -> int:
            occurrences = self._occurrences(first, len(vocabulary))
            return sum(n * cost for n, cost in zip(occurrences, costs, strict=False))

        first = bisect_right(range(max(1, left) + 1), left, key=tokens_of) - 1
        occurrences = self._occurrences(max(0, first), len(vocabulary))
        asked = [*occurrences[1 : ASKED + 1], *(occurrences[ASKED + 1 : ASKED + 2] or [0])]
        if len(asked) <= ASKED or any(one <= other for one, other in pairwise(asked)):
            raise BadParameter(
                f"frequent_words.tokens must hold {ASKED} words that differ in number, got "
                f"{tokens}: take more."
            )
        words = [word for word, n in zip(vocabulary, occurrences, strict=False) for _ in range(n)]
        random.shuffle(words)
        answer, items = join_items(vocabulary[1 : ASKED + 1])
        question = prompt.ask(Question("", answer, KIND, items=items), "")
        name = f"{KIND}-{tokens}-{seed}"
        return worded_text(name, " ".join(words), [question], sources.wording, prompt.opening)

    def _occurrences(self, first: int, ranks: int) -> Sequence[int]:
        """Occurrences by rank, if the first rank has `first`; ranks without any are left out."""
        found = list[int]()
        for rank in range(1, ranks + 1):
            occurrences = int(first * rank**-self.alpha)
            if not occurrences:
                break
            found.append(occurrences)
        return found


def _vocabulary(random: Random, size: int) -> list[str]:
    """Noise, then random words without repetition."""
    words = dict.fromkeys([NOISE])
    while len(words) <= size:
        words["".join(random.choices(ascii_lowercase, k=WORD_LETTERS))] = None
    return list(words)


Part = FrequentWords
