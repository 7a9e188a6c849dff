"""A text with sentences hidden in it that are asked for behind it, the answers written out.

The sentences and the text around them are made from the bundled text, so that nothing is
downloaded. Answers stand in the text, so no model has to get them right to be measured.
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
        asking: the tokens from which the tokens of the answer are predicted.
    """

    needle: tuple[int, int]
    asking: tuple[int, ...]


@dataclass(frozen=True)
class NeedlePassage:
    """The whole text, and what is hidden in it."""

    ids: tuple[int, ...]
    hidden: tuple[HiddenNeedle, ...]

    @property
    def asking(self) -> tuple[int, ...]:
        """All tokens that predict a token of an answer."""
        return tuple(token for each in self.hidden for token in each.asking)


@dataclass(frozen=True)
class NeedleSettings:
    """How a passage is made.

    Args:
        tokens: length of the text that sentences are hidden in.
        count: of hidden sentences, evenly spread.
        words: in the answer to each.
    """

    tokens: int = 1536
    count: int = 8
    words: int = 4

    def __post_init__(self) -> None:
        if self.tokens < self.count or self.count < 1 or self.words < 1:
            raise BadParameter(
                f"Needles need a count and words of 1 or more, and tokens for each, got {self}."
            )

    def passage(self, sample: SampleText) -> NeedlePassage:
        """The text with the sentences in it, and all questions behind it."""
        names, answers = self._drawn(sample)
        text, ids = sample.ids(self.tokens), list[int]()
        needles: list[tuple[int, int]] = []
        for place, (name, answer) in enumerate(zip(names, answers, strict=True)):
            cuts = [len(text) * side // self.count for side in (place, place + 1)]
            ids += text[cuts[0] : sum(cuts) // 2]
            start = len(ids)
            ids += [*sample.encode(NEEDLE_TEMPLATE.format(name=name)), *answer, *sample.encode(".")]
            needles.append((start, len(ids)))
            ids += text[sum(cuts) // 2 : cuts[1]]
        asking: list[tuple[int, ...]] = []
        for name, answer in zip(names, answers, strict=True):
            ids += sample.encode(QUESTION_TEMPLATE.format(name=name))
            asking.append(tuple(range(len(ids) - 1, len(ids) - 1 + len(answer))))
            ids += [*answer, *sample.encode(".")]
        pairs = zip(needles, asking, strict=True)
        return NeedlePassage(
            tuple(ids), tuple(HiddenNeedle(needle, rows) for needle, rows in pairs)
        )

    def _drawn(self, sample: SampleText) -> tuple[list[str], list[Sequence[int]]]:
        """Who keeps the words, and the words as tokens; all drawn alike for the same text."""
        source = torch.Generator().manual_seed(SEED)
        order = torch.randperm(len(sample.words), generator=source).tolist()
        drawn = [sample.words[place] for place in order]
        names = [word.capitalize() for word in drawn[: self.count]]
        rest = [drawn[place % len(drawn)] for place in range(self.count, len(drawn) * 2)]
        cuts = range(0, self.count * self.words, self.words)
        texts = [" " + " ".join(rest[cut : cut + self.words]) for cut in cuts]
        return names, [tuple(sample.encode(text)) for text in texts]
