"""Training samples: a task's text, then its questions with their answers, as one row of tokens."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from larder.core.conversation import Message
from larder.core.errors import BadParameter
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import Task, parse_task
from training.model_config import BOS, END, SPECIAL

SKIPPED, TEXT, ANSWER = 0, 1, 2  # what a token is for the loss
RECIPE = Path(__file__).with_name("recipe.toml")
COPY, PLAIN = "copy", "plain"
REPEAT = "Repeat the text."
CHARACTERS_PER_TOKEN = 3  # at least, in prose
TRIES = 200

Turn = tuple[Message, int]  # and what its tokens are for the loss


@dataclass(frozen=True)
class TrainingSample:
    """One row: token ids, and what each of them is for the loss."""

    ids: tuple[int, ...]
    uses: tuple[int, ...]


@dataclass(frozen=True)
class MixtureComponent:
    """One kind of sample.

    Args:
        spelling: a task; `{questions}` in it becomes as many as there is room for. Or `copy`, a
            text to repeat, or `plain`, text alone.
        share: of the samples, relative to the others.
        asked: the share of a sample's tokens that questions and answers take.
        each: tokens of one question with its answer, about.
        most: the most that `{questions}` becomes.
    """

    spelling: str
    share: float
    asked: float
    each: int = 30
    most: int = 1000


@dataclass(frozen=True)
class Phase:
    """A context length in tokens and the share of the training time spent on it."""

    context: int
    share: float


@dataclass(frozen=True)
class Recipe:
    """What is trained on, in which order of lengths."""

    ingredients: tuple[MixtureComponent, ...]
    phases: tuple[Phase, ...]

    @staticmethod
    def read(path: Path = RECIPE) -> Recipe:
        """The recipe of a TOML file."""
        fields: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return Recipe(
            tuple(MixtureComponent(**each) for each in fields["tasks"]),
            tuple(Phase(**each) for each in fields["phases"]),
        )


@dataclass(frozen=True)
class SampleMixture:
    """Draws samples.

    Args:
        tokenizer: the trained `tokenizers.Tokenizer`, whose special tokens are those of `shapes`.
    """

    ingredients: Sequence[MixtureComponent]
    sources: TaskSources
    tokenizer: Any

    def draw(self, random: Random, context: int) -> TrainingSample:
        """A sample of at most `context` + 1 tokens: the last is only predicted.

        Raises:
            BadParameter: no task of the recipe fits into so few tokens.
        """
        shares = [each.share for each in self.ingredients]
        for _ in range(TRIES):
            ingredient = random.choices(self.ingredients, shares)[0]
            try:
                return self._written(self._turns(ingredient, random, context), context + 1)
            except BadParameter:  # this task needs more room
                continue
        raise BadParameter(f"training.context must hold a task of the recipe, got {context}.")

    def rows(
        self, seed: int, context: int, count: int
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
        """Batches without end: ids and uses of `count` rows of `context` + 1 tokens, padded."""
        random = Random(seed)
        while True:
            ids = np.zeros((count, context + 1), np.int32)
            uses = np.zeros((count, context + 1), np.uint8)
            for row in range(count):
                sample = self.draw(random, context)
                ids[row, : len(sample.ids)] = sample.ids
                uses[row, : len(sample.uses)] = sample.uses
            yield ids, uses

    def _turns(self, ingredient: MixtureComponent, random: Random, context: int) -> list[Turn]:
        if ingredient.spelling == PLAIN:
            return [(Message("user", self._passage(random, context)), TEXT)]
        room = int(context * (1 - ingredient.asked)) - 1
        if ingredient.spelling == COPY:
            text = self._passage(random, int(room * 0.9))
            return _exchange(f"{text} {REPEAT}", text)
        questions = max(1, int(context * ingredient.asked) // ingredient.each)
        questions = str(min(questions, ingredient.most))
        task = _task(ingredient.spelling.replace("{questions}", questions))
        conversation = task.make(random.randrange(2**31), room, self.sources)
        told = [(message, TEXT) for message in conversation.messages]
        asked = random.sample(conversation.questions, len(conversation.questions))
        return told + [turn for q in asked for turn in _exchange(q.question, q.answer)]

    def _passage(self, random: Random, tokens: int) -> str:
        """Prose of about so many tokens, and not more."""
        text = random.choice(self.sources.prose)
        length = tokens * CHARACTERS_PER_TOKEN
        start = random.randrange(max(1, len(text) - length))
        ids = self.tokenizer.encode(text[start : start + length]).ids
        return self.tokenizer.decode(ids[: max(1, tokens - 8)])

    def _written(self, turns: Sequence[Turn], most: int) -> TrainingSample:
        """The turns in the form of the chat template; those that do not fit are left out whole.

        Raises:
            BadParameter: no answer fits where there should be one.
        """
        encoded = self.tokenizer.encode_batch([message.content for message, _ in turns])
        ids, uses = [BOS], [SKIPPED]
        for (message, use), text in zip(turns, encoded, strict=True):
            if len(ids) + len(text.ids) + 2 > most and use == ANSWER:
                break
            ids += [SPECIAL.index(f"<|{message.role}|>"), *text.ids, END]
            uses += [SKIPPED, *[use] * (len(text.ids) + 1)]
        wanted = any(use == ANSWER for _, use in turns)
        if wanted and ANSWER not in uses[:most]:
            raise BadParameter("training.context holds no answer of this task.")
        return TrainingSample(tuple(ids[:most]), tuple(uses[:most]))


def _exchange(question: str, answer: str) -> list[Turn]:
    return [(Message("user", question), TEXT), (Message("assistant", answer), ANSWER)]


@lru_cache(maxsize=1024)
def _task(spelling: str) -> Task:
    return parse_task(spelling)
