"""Needle passage: a text with hidden sentences, followed by questions with their answers.

Sentences and surrounding text come from the bundled text, so nothing is downloaded. The answers are
part of the text, so that a model can be measured whether or not it would answer correctly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from larder.core.errors import BadParameter
from larder.models.measurements.base import SampleText

SEED = 0
NEEDLE_TEMPLATE = "\nBy the way, the secret words of {name} are"
QUESTION_TEMPLATE = "\nWhat are the secret words of {name}? They are"


@dataclass(frozen=True)
class HiddenNeedle:
    """One hidden sentence.

    Args:
        needle: tokens [start, stop) of the sentence.
        question: index of the first token of its question.
        predicting: indices of the tokens that predict the tokens of the answer.
    """

    needle: tuple[int, int]
    question: int
    predicting: tuple[int, ...]


@dataclass(frozen=True)
class NeedlePassage:
    """Token ids of the passage, with its hidden sentences.

    Args:
        context: tokens before the questions.
    """

    ids: tuple[int, ...]
    context: int
    needles: tuple[HiddenNeedle, ...]

    @property
    def predicting(self) -> tuple[int, ...]:
        """Indices of all tokens that predict a token of an answer."""
        return tuple(token for each in self.needles for token in each.predicting)


@dataclass(frozen=True)
class NeedleSettings:
    """Settings of a needle passage.

    Args:
        tokens: length of the text around the sentences.
        count: number of hidden sentences, evenly spread.
        words: number of words in each answer.
    """

    tokens: int = 1536
    count: int = 8
    words: int = 4

    def __post_init__(self) -> None:
        if self.tokens < self.count or self.count < 1 or self.words < 1:
            raise BadParameter(
                f"Needles need count >= 1, words >= 1 and tokens >= count, got {self}."
            )

    def passage(self, sample: SampleText) -> NeedlePassage:
        """Bundled text with the hidden sentences, followed by all questions and answers."""
        return self.hidden_in(sample.ids(self.tokens), sample, SEED)

    def hidden_in(self, text: Sequence[int], sample: SampleText, seed: int) -> NeedlePassage:
        """Another text with the hidden sentences, followed by all questions and answers.

        Args:
            text: token ids, all of which stay.
            sample: text whose words are hidden.
            seed: of the drawn words.
        """
        names, answers = self._drawn(sample, seed)
        ids = list[int]()
        needles: list[tuple[int, int]] = []
        for index, (name, answer) in enumerate(zip(names, answers, strict=True)):
            cuts = [len(text) * side // self.count for side in (index, index + 1)]
            ids += text[cuts[0] : sum(cuts) // 2]
            start = len(ids)
            ids += [*sample.encode(NEEDLE_TEMPLATE.format(name=name)), *answer, *sample.encode(".")]
            needles.append((start, len(ids)))
            ids += text[sum(cuts) // 2 : cuts[1]]
        context, questions, predicting = len(ids), list[int](), list[tuple[int, ...]]()
        for name, answer in zip(names, answers, strict=True):
            questions.append(len(ids))
            ids += sample.encode(QUESTION_TEMPLATE.format(name=name))
            predicting.append(tuple(range(len(ids) - 1, len(ids) - 1 + len(answer))))
            ids += [*answer, *sample.encode(".")]
        hidden = zip(needles, questions, predicting, strict=True)
        return NeedlePassage(
            tuple(ids),
            context,
            tuple(HiddenNeedle(needle, question, rows) for needle, question, rows in hidden),
        )

    def _drawn(self, sample: SampleText, seed: int) -> tuple[list[str], list[Sequence[int]]]:
        """Names and answers as tokens, drawn deterministically from the sample text."""
        source = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(sample.words), generator=source).tolist()
        drawn = [sample.words[index] for index in order]
        names = [word.capitalize() for word in drawn[: self.count]]
        rest = [drawn[index % len(drawn)] for index in range(self.count, len(drawn) * 2)]
        cuts = range(0, self.count * self.words, self.words)
        texts = [" " + " ".join(rest[cut : cut + self.words]) for cut in cuts]
        return names, [tuple(sample.encode(text)) for text in texts]
