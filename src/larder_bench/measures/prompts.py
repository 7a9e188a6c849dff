"""Scores of answers by the similarity between the question and the prompt that scores entries.

A policy that scores entries by the question gets other prompts instead: utterances of the
conversation around one percentile of their similarity to the question, and then the question
itself, whose items are the cell's. Every question and prompt has a prefill of its own. Kim et al.,
"EpiCache: Episodic KV Cache Management for Long Conversational Question Answering" (2025),
arXiv:2509.17396, section 2.3, figure 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from jaxtyping import Int

from larder.core import BadParameter, Conversation, InputError, UsageError, public_name
from larder.session import (
    ConversationMemory,
    Policy,
    SizeOptions,
    episode_prompt,
    prefill_conversation,
)
from larder_bench.measures.base import Measure
from larder_bench.measures.forced import ForcedAnswers
from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.scoring.item_scores import NumberedQuestion
from larder_bench.studies.cells import Cell
from larder_bench.studies.methods import PolicyMethod
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.question_sequences import number_questions
from larder_bench.studies.target_size import TargetSize, row_figures
from larder_bench.tasks.base import QuestionStyle

Ids = tuple[int, ...]
LONGEST_STEP = 50  # percentiles


@dataclass(frozen=True)
class PromptsMeasure(Measure):
    """Answers by the similarity of the prompt to the question.

    Args:
        utterances: number of utterances of a prompt.
        step: percentiles from one prompt to the next; the first is at half a step.
        embedder: embedder that similarities are computed with.
    """

    asks: ClassVar[bool] = True
    reads_each: ClassVar[bool] = True
    utterances: int = 8
    step: int = 10
    embedder: str = "minilm"

    def __post_init__(self) -> None:
        if self.utterances < 1:
            raise BadParameter(f"prompts.utterances must be 1 or more, got {self.utterances}.")
        if not 1 <= self.step <= LONGEST_STEP:
            raise BadParameter(f"prompts.step must be from 1 to {LONGEST_STEP}, got {self.step}.")

    def brief(self) -> Self:
        """Measure with two prompts beside the question."""
        return replace(self, step=LONGEST_STEP)

    def measure(self, bench: ModelContext, cell: Cell, tokens_per_byte: float | None) -> Row:
        policy = _policy(cell)
        conversation = bench.conversation(cell.task, cell.seed, cell.tokens)
        sequences = number_questions(cell.task, conversation)
        questions = [one for sequence in sequences for one in sequence]
        tokenizer = bench.engine.tokenizer
        exact = [tokenizer.encode_question(one.question.question) for one in questions]
        reader = _PromptReader(bench, conversation, policy)
        figures, sized = reader.first(cell, exact[0], tokens_per_byte)
        rows: list[Row] = []
        prompts_by_percentile = self._prompts(bench, conversation, questions)
        for percentile, (similarities, prompts) in prompts_by_percentile.items():
            items = reader.items(questions, prompts, similarities, sized)
            rows.append({"row": "prompt", "percentile": percentile, "items": items})
        items = reader.items(questions, exact, [1.0] * len(questions), sized)
        rows.append({"row": "prompt", "percentile": None, "items": items})
        return figures | {"items": items, EXHIBITS_KEY: rows}

    def _prompts(
        self, bench: ModelContext, conversation: Conversation, numbered: Sequence[NumberedQuestion]
    ) -> Mapping[float, tuple[list[float], list[Ids]]]:
        """Similarities and prompts, one per question, by percentile.

        Raises:
            InputError: the conversation has fewer utterances than a prompt.
        """
        utterances = [
            message.content for message in conversation.messages if message.role == "user"
        ]
        if len(utterances) < self.utterances:
            raise InputError(
                f"{conversation.name} has {len(utterances)} utterances, fewer than "
                f"the {self.utterances} of a prompt: take prompts(utterances=...) with less, or a "
                "longer conversation."
            )
        embedder = bench.engine.runtime.embedder(self.embedder)
        questions = embedder.embed_questions([one.question.question for one in numbered])
        similarities = questions @ embedder.embed_segments(utterances).T
        order = np.argsort(-similarities, axis=1, kind="stable")
        prompts: dict[float, tuple[list[float], list[Ids]]] = {}
        for percentile in np.arange(self.step / 2, 100, self.step).tolist():
            chosen = self._around(percentile, order)
            means = np.take_along_axis(similarities, chosen, axis=1).mean(axis=1)
            texts = [[utterances[index] for index in row] for row in chosen.tolist()]
            tokenizer = bench.engine.tokenizer
            prompts[percentile] = (
                means.tolist(),
                [episode_prompt(tokenizer, each) for each in texts],
            )
        return prompts

    def _around(self, percentile: float, order: Int[np.ndarray, "Q N"]) -> Int[np.ndarray, "Q U"]:
        """Indices of the utterances around a percentile of their order, in conversation order."""
        count = order.shape[1]
        middle = round(count * percentile / 100)
        first = min(max(0, middle - self.utterances // 2), count - self.utterances)
        return np.sort(order[:, first : first + self.utterances], axis=1)


@dataclass(frozen=True)
class _PromptReader:
    """Conversation that is prefilled again for every question and prompt."""

    bench: ModelContext
    conversation: Conversation
    policy: Policy

    def first(self, cell: Cell, prompt: Ids, tokens_per_byte: float | None) -> tuple[Row, Policy]:
        """Figures of the first prefill, and the policy with the size of all prefills."""
        if cell.amount is None:
            memory, tries = self._read(None, prompt), 1
        else:
            engine = self.bench.engine
            context = len(engine.tokenizer.encode_conversation(self.conversation).ids)
            target = TargetSize(cell.amount, cell.matched, context, engine.loaded.decoder.spec)
            fit = target.read(lambda tokens: self._read(tokens, prompt), tokens_per_byte)
            memory, tries = fit.result, fit.tries
        return row_figures(memory.figures) | {"reads": tries}, memory.policy

    def items(
        self,
        questions: Sequence[NumberedQuestion],
        prompts: Sequence[Ids],
        similarities: Sequence[float],
        sized: Policy,
    ) -> list[Row]:
        """Items of all questions, each asked of the memory prefilled with its prompt."""
        reader, items = replace(self, policy=sized), list[Row]()
        for one, prompt, similarity in zip(questions, prompts, similarities, strict=True):
            memory = reader._read(None, prompt)
            scored = ForcedAnswers().ask(self.bench.engine, memory, [one])
            items += [item | {"similarity": round(similarity, 4)} for item in scored]
        return items

    def _read(self, tokens: int | None, prompt: Ids) -> ConversationMemory:
        sizes = SizeOptions(tokens)
        prompts = {"question": prompt}
        return prefill_conversation(
            self.bench.engine.runtime, self.conversation, self.policy, sizes, prompts
        )


def _policy(cell: Cell) -> Policy:
    """Policy of a cell whose prompt can be replaced.

    Raises:
        UsageError: the policy has no prompt to replace, or questions build on each other.
    """
    subject = cell.subject
    if not isinstance(subject, PolicyMethod) or not subject.variant.needs_question:
        raise UsageError(
            f"{subject.name} does not score by the question, so no other prompt can replace it: "
            'take a policy with patched(prompt="question"), and --control none.'
        )
    if cell.task.style not in (QuestionStyle.INDEPENDENT, QuestionStyle.RECITAL):
        raise UsageError(
            f"Questions of {public_name(type(cell.task))} build on each other, but prompts has a "
            "prefill for each: take a task with independent questions."
        )
    return subject.variant.policy


Part = PromptsMeasure
