"""Passage: a stretch of the text, to be recited verbatim from its first words on.

No paper: long generation in which every token can be checked. The score is the exact prefix: the
share of the passage before the first wrong word, or under teacher forcing the first wrong token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from larder.core import BadParameter, Conversation, Question
from larder.session import ACKNOWLEDGEMENT
from larder_bench.datasets.haystack import Haystack
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS
from larder_bench.datasets.prompt_templates import PROMPTS, worded_text
from larder_bench.datasets.sources import TaskSources
from larder_bench.scoring.dataset_metrics import PREFIX_SHARE
from larder_bench.tasks.base import BenchTask

KIND = "passage"
FIRST_WORDS = 6  # that name a passage


@dataclass(frozen=True)
class Passages(BenchTask):
    """Passages of a text.

    Args:
        questions: number of passages.
        length: words of a passage after its first ones.
        of: source of the text.
    """

    questions: int = 4
    length: int = 32
    of: Haystack = Haystack.TALK

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise BadParameter(f"passage.questions must be 1 or more, got {self.questions}.")
        if self.length < 1:
            raise BadParameter(f"passage.length must be 1 or more, got {self.length}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random, count = Random(seed), sources.count_tokens
        prompt = PROMPTS[KIND].of(sources.wording)
        left = tokens - count(prompt.opening) - count(ACKNOWLEDGEMENT) - 2 * MESSAGE_MARKER_TOKENS
        words = list[str]()
        for sentence in self.of.sentences(sources, random):
            left -= count(f" {sentence}")
            if left < 0:
                break
            words += sentence.split()
        starts = _named_starts(words, self.length)
        if len(starts) < self.questions:
            raise BadParameter(
                f"passage.questions is {self.questions}, but {tokens} tokens of this text hold "
                f"{len(starts)} passages of {self.length} words with a beginning of their own: ask "
                "fewer, or take more tokens."
            )
        questions, offsets = list[Question](), list[int]()
        for start in random.sample(starts, self.questions):
            stop = start + FIRST_WORDS
            first, rest = " ".join(words[start:stop]), words[stop : stop + self.length]
            answer = Question("", " ".join(rest), KIND, scorer=PREFIX_SHARE)
            questions.append(prompt.ask(answer, first))
            offsets.append(len(" ".join([*words[:stop], ""])))
        name = f"{KIND}-{tokens}-{seed}"
        text = " ".join(words)
        return worded_text(name, text, questions, sources.wording, prompt.opening, starts=offsets)


def _named_starts(words: list[str], length: int) -> list[int]:
    """Starts of passages whose first words stand nowhere else in the text."""
    firsts = [tuple(words[n : n + FIRST_WORDS]) for n in range(len(words) - FIRST_WORDS + 1)]
    occurrences = Counter(firsts)
    whole = range(max(0, len(words) - FIRST_WORDS - length + 1))
    return [start for start in whole if occurrences[firsts[start]] == 1]


Part = Passages
