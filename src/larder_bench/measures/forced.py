"""Expected answers under teacher forcing: exact match of greedy decoding, log-likelihood.

All questions are read side by side in scratch mode. Scratch mode attends to every offloaded entry,
so with a policy that recalls, answers are read token by token on a fork instead. Entries that a
policy would evict during generation are kept, otherwise answers could not be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from larder.engine import Engine
from larder.session import ConversationMemory
from larder_bench.measures.base import Measure
from larder_bench.results.rows import Row
from larder_bench.scoring.item_scores import NumberedQuestion, likelihood_items
from larder_bench.scoring.teacher_forcing import score_answers, score_answers_stepwise
from larder_bench.studies.cells import Cell
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.question_sequences import ConversationReader, ask_all


@dataclass(frozen=True)
class ForcedAnswers(Measure):
    """Likelihood of the expected answers under teacher forcing."""

    supports_inside: ClassVar[bool] = True
    asks: ClassVar[bool] = True

    def measure(self, bench: ModelContext, cell: Cell, tokens_per_byte: float | None) -> Row:
        reader = ConversationReader.of(bench, cell, tokens_per_byte)
        items = ask_all(reader, cell.task, self)
        return reader.figures() | {"items": items}

    def ask(
        self, engine: Engine, memory: ConversationMemory, numbered: Sequence[NumberedQuestion]
    ) -> list[Row]:
        """Items of these questions."""
        questions = [one.question for one in numbered]
        recalls = memory.policy.recall is not None
        results = (score_answers_stepwise if recalls else score_answers)(engine, memory, questions)
        pairs = zip(numbered, results, strict=True)
        return [
            item
            for one, result in pairs
            for item in likelihood_items(one, result, engine.tokenizer)
        ]


Part = ForcedAnswers
