"""The nearer the prompt that entries are judged by is to the question, the better the answer?

A policy that judges by the question is given other prompts in its place: utterances of the
conversation, taken around one percentile of their nearness to the question, and then the question
itself, whose items are the cell's. Every question and prompt has a reading of its own. Kim et al.,
"EpiCache: Episodic KV Cache Management for Long Conversational Question Answering" (2025),
arXiv:2509.17396, section 2.3, figure 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int

from larder.core.conversation import Conversation
from larder.core.errors import BadParameter, InputError, UsageError
from larder.core.spelling import name_of
from larder.session.memory import ConversationMemory
from larder.session.policy import Policy
from larder.session.prefill import SizeOptions, episode_prompt, prefill_conversation
from larder_bench.measures.base import Measure
from larder_bench.measures.forced import ForcedAnswers
from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.scoring.item_scores import NumberedQuestion
from larder_bench.studies.cells import Cell
from larder_bench.studies.methods import PolicyMethod
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.question_sequences import number_questions
from larder_bench.studies.size_matching import TargetSize, row_figures
from larder_bench.tasks.base import QuestionStyle

Ids = tuple[int, ...]


@dataclass(frozen=True)
class PromptsMeasure(Measure):
    """Answers by how near the prompt is to the question.

    Args:
        utterances: of one prompt.
        step: percentiles from one prompt to the next; the first lies at half a step.
        embedder: by which nearness is told.
    """

    utterances: int = 8
    step: int = 10
    embedder: str = "minilm"

    def __post_init__(self) -> None:
        if self.utterances < 1:
            raise BadParameter(f"prompts.utterances must be 1 or more, got {self.utterances}.")
        if not 1 <= self.step <= 50:
            raise BadParameter(f"prompts.step must be from 1 to 50, got {self.step}.")

    def measure(self, bench: ModelContext, cell: Cell, guess: float | None) -> Row:
        policy = _policy(cell)
        conversation = bench.conversation(cell.task, cell.seed, cell.tokens)
        asked = [one for sitting in number_questions(cell.task, conversation) for one in sitting]
        scribe = bench.engine.tokenizer
        exact = [scribe.encode_question(one.question.question) for one in asked]
        found = _PromptReader(bench, conversation, policy)
        told, filled = found.first(cell, exact[0], guess)
        rows: list[Row] = []
        for percentile, (nearness, prompts) in self._prompts(bench, conversation, asked).items():
            items = found.items(asked, prompts, nearness, filled)
            rows.append({"row": "prompt", "percentile": percentile, "items": items})
        items = found.items(asked, exact, [1.0] * len(asked), filled)
        rows.append({"row": "prompt", "percentile": None, "items": items})
        return told | {"items": items, EXHIBITS_KEY: rows}

    def _prompts(
        self, bench: ModelContext, conversation: Conversation, asked: Sequence[NumberedQuestion]
    ) -> Mapping[float, tuple[list[float], list[Ids]]]:
        """By percentile, one prompt per question, and how near it is.

        Raises:
            InputError: the conversation has fewer utterances than a prompt.
        """
        said = [message.content for message in conversation.messages if message.role == "user"]
        if len(said) < self.utterances:
            raise InputError(
                f"{conversation.name} has {len(said)} utterances, fewer than the {self.utterances} "
                "of a prompt: take prompts(utterances=...) with less, or a longer conversation."
            )
        embedder = bench.engine.runtime.embedder(self.embedder)
        questions = embedder.embed_questions([one.question.question for one in asked])
        likeness = questions @ embedder.embed_segments(said).T
        order = np.argsort(-likeness, axis=1, kind="stable")
        found: dict[float, tuple[list[float], list[Ids]]] = {}
        for percentile in np.arange(self.step / 2, 100, self.step).tolist():
            chosen = self._around(percentile, order)
            near = np.take_along_axis(likeness, chosen, axis=1).mean(axis=1)
            texts = [[said[place] for place in row] for row in chosen.tolist()]
            scribe = bench.engine.tokenizer
            found[percentile] = near.tolist(), [episode_prompt(scribe, own) for own in texts]
        return found

    def _around(self, percentile: float, order: Int[np.ndarray, "Q N"]) -> Int[np.ndarray, "Q U"]:
        """The places of utterances around a percentile of their order, as they were said."""
        count = order.shape[1]
        middle = round(count * percentile / 100)
        first = min(max(0, middle - self.utterances // 2), count - self.utterances)
        return np.sort(order[:, first : first + self.utterances], axis=1)


@dataclass(frozen=True)
class _PromptReader:
    """A conversation that is read anew for every question and prompt."""

    bench: ModelContext
    conversation: Conversation
    policy: Policy

    def first(self, cell: Cell, prompt: Ids, guess: float | None) -> tuple[Row, Policy]:
        """What a reading takes, and the policy with the size that all readings have."""
        if cell.amount is None:
            memory, tries = self._read(None, prompt), 1
        else:
            engine = self.bench.engine
            context = len(engine.tokenizer.encode_conversation(self.conversation).ids)
            wanted = TargetSize(cell.amount, cell.matched, context, engine.loaded.decoder.spec)
            found = wanted.read(lambda tokens: self._read(tokens, prompt), guess)
            memory, tries = found.made, found.tries
        return row_figures(memory.figures) | {"reads": tries}, memory.policy

    def items(
        self,
        asked: Sequence[NumberedQuestion],
        prompts: Sequence[Ids],
        nearness: Sequence[float],
        own: Policy,
    ) -> list[Row]:
        """The items of all questions, each asked of what was read by its prompt."""
        again, items = replace(self, policy=own), list[Row]()
        for one, prompt, near in zip(asked, prompts, nearness, strict=True):
            memory = again._read(None, prompt)
            told = ForcedAnswers().ask(self.bench.engine, memory, [one])
            items += [item | {"similarity": round(near, 4)} for item in told]
        return items

    def _read(self, tokens: int | None, prompt: Ids) -> ConversationMemory:
        sizes = SizeOptions(tokens)
        book = {"question": prompt}
        return prefill_conversation(
            self.bench.engine.runtime, self.conversation, self.policy, sizes, book
        )


def _policy(cell: Cell) -> Policy:
    """Raises: UsageError: it has no prompt to replace, or questions stand behind each other."""
    subject = cell.subject
    if not isinstance(subject, PolicyMethod) or not subject.variant.needs_question:
        raise UsageError(
            f"{subject.name} does not judge by the question, so no other prompt can stand in its "
            'place: take one with patched(prompt="question"), and --control none.'
        )
    if cell.task.style not in (QuestionStyle.INDEPENDENT, QuestionStyle.RECITAL):
        raise UsageError(
            f"Questions of {name_of(type(cell.task))} stand behind each other, and prompts has a "
            "reading for each: take a task whose questions stand alone."
        )
    return subject.variant.policy


Part = PromptsMeasure
