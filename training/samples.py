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
from larder_bench.tasks.base import BenchTask, parse_task
from training.model_config import BOS, END, SPECIAL

SKIPPED, TEXT, ANSWER = 0, 1, 2  # use of a token in the loss
RECIPE = Path(__file__).with_name("recipe.toml")
COPY, PLAIN = "copy", "plain"
REPEAT = "Repeat the text."
CHARACTERS_PER_TOKEN = 3  # at least, in prose
TRIES = 200

Turn = tuple[Message, int]  # and the use of its tokens in the loss


@dataclass(frozen=True)
class TrainingSample:
    """Row of token ids, and the use of each of them in the loss."""

    ids: tuple[int, ...]
    uses: tuple[int, ...]


@dataclass(frozen=True)
class MixtureComponent:
    """Kind of sample.

    Args:
        spelling: a task, in which `{questions}` is replaced by the number that fits; or `copy`, a
            text to repeat, or `plain`, only text.
        share: share of the samples, relative to the others.
        asked: share of a sample's tokens for questions and answers.
        each: approximate number of tokens of a question with its answer.
        most: maximum of `{questions}`.
    """

    spelling: str
    share: float
    asked: float
    each: int = 30
    most: int = 1000


@dataclass(frozen=True)
class Phase:
    """Context length in tokens and the share of the training time spent on it."""

    context: int
    share: float


@dataclass(frozen=True)
class Recipe:
    """Mixture of training data, and the order of context lengths."""

    ingredients: tuple[MixtureComponent, ...]
    phases: tuple[Phase, ...]

    @staticmethod
    def read(path: Path = RECIPE) -> Recipe:
        """Recipe of a TOML file."""
        fields: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return Recipe(
            tuple(MixtureComponent(**each) for each in fields["tasks"]),
            tuple(Phase(**each) for each in fields["phases"]),
        )


@dataclass(frozen=True)
class SampleMixture:
    """Generator of samples.

    Args:
        tokenizer: trained `tokenizers.Tokenizer` with the special tokens of `model_config`.
    """

    ingredients: Sequence[MixtureComponent]
    sources: TaskSources
    tokenizer: Any

    def draw(self, random: Random, context: int) -> TrainingSample:
        """Sample of at most `context` + 1 tokens: the last one is only predicted.

        Raises:
            BadParameter: no task of the recipe fits.
        """
        shares = [each.share for each in self.ingredients]
        for _ in range(TRIES):
            ingredient = random.choices(self.ingredients, shares)[0]
            try:
                return self._encode(self._turns(ingredient, random, context), context + 1)
            except BadParameter:  # this task needs more tokens
                continue
        raise BadParameter(f"training.context must hold a task of the recipe, got {context}.")

    def rows(
        self, seed: int, context: int, count: int
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
        """Endless batches: ids and uses of `count` rows of `context` + 1 tokens, padded."""
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
        count = max(1, int(context * ingredient.asked) // ingredient.each)
        count = min(count, ingredient.most)
        task = _task(ingredient.spelling.replace("{questions}", str(count)))
        conversation = task.make(random.randrange(2**31), room, self.sources)
        turns = [(message, TEXT) for message in conversation.messages]
        questions = random.sample(conversation.questions, len(conversation.questions))
        return turns + [turn for q in questions for turn in _exchange(q.question, q.answer)]

    def _passage(self, random: Random, tokens: int) -> str:
        """Prose of at most about `tokens` tokens."""
        text = random.choice(self.sources.prose)
        length = tokens * CHARACTERS_PER_TOKEN
        start = random.randrange(max(1, len(text) - length))
        ids = self.tokenizer.encode(text[start : start + length]).ids
        return self.tokenizer.decode(ids[: max(1, tokens - 8)])

    def _encode(self, turns: Sequence[Turn], most: int) -> TrainingSample:
        """Turns in the form of the chat template; turns that do not fit are left out completely.

        Raises:
            BadParameter: no answer fits although the turns have one.
        """
        encoded = self.tokenizer.encode_batch([message.content for message, _ in turns])
        ids, uses = [BOS], [SKIPPED]
        for (message, use), text in zip(turns, encoded, strict=True):
            if len(ids) + len(text.ids) + 2 > most and use == ANSWER:
                break
            ids += [SPECIAL.index(f"<|{message.role}|>"), *text.ids, END]
            uses += [SKIPPED, *[use] * (len(text.ids) + 1)]
        has_answer = any(use == ANSWER for _, use in turns)
        if has_answer and ANSWER not in uses[:most]:
            raise BadParameter("training.context holds no answer of this task.")
        return TrainingSample(tuple(ids[:most]), tuple(uses[:most]))


def _exchange(question: str, answer: str) -> list[Turn]:
    return [(Message("user", question), TEXT), (Message("assistant", answer), ANSWER)]


@lru_cache(maxsize=1024)
def _task(spelling: str) -> BenchTask:
    return parse_task(spelling)
