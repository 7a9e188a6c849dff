"""KL divergence from the full cache at each token of the right answers.

KL(full || policy) in nats per token, end of turn included, besides exact match and log-likelihood.
M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, figure 4b, compares layer budgets by
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from larder.core import UsageError, public_name
from larder.engine import Engine
from larder.session import ConversationMemory
from larder_bench.measures.base import Measure
from larder_bench.results.rows import Row
from larder_bench.scoring.item_scores import NumberedQuestion
from larder_bench.scoring.kl_divergence import kl_divergence
from larder_bench.scoring.teacher_forcing import AnswerLogits, answer_logits, answer_logits_stepwise
from larder_bench.studies.cells import Cell
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.question_sequences import ConversationReader, ask_all
from larder_bench.tasks.base import QuestionStyle


@dataclass(frozen=True)
class AnswerKl(Measure):
    """KL divergence from the full cache at the expected answers."""

    supports_inside: ClassVar[bool] = True
    asks: ClassVar[bool] = True

    def measure(self, bench: ModelContext, cell: Cell, tokens_per_byte: float | None) -> Row:
        if cell.task.style not in (QuestionStyle.INDEPENDENT, QuestionStyle.RECITAL):
            raise UsageError(
                f"Questions of {public_name(type(cell.task))} build on each other, but answer_kl "
                "asks each on its own: "
                "take a task with independent questions, or the measure forced."
            )
        reader = ConversationReader.of(bench, cell, tokens_per_byte)
        items = ask_all(reader, cell.task, _KlScorer(bench.expected(reader.conversation)))
        return reader.figures() | {"items": items}


@dataclass(frozen=True)
class _KlScorer:
    """Scorer of answers by their divergence from the full cache's logits.

    Args:
        true: the full cache's logits at each token of the answer, by number of the question.
    """

    true: Mapping[int, Float[Tensor, "N V"]]

    def ask(
        self, engine: Engine, memory: ConversationMemory, numbered: Sequence[NumberedQuestion]
    ) -> list[Row]:
        """Items of these questions."""
        recalls = memory.policy.recall is not None
        answers = (answer_logits_stepwise if recalls else answer_logits)(
            engine, memory, [one.question for one in numbered]
        )
        items = {
            one.question_index: self._item(numbered[one.question_index], one) for one in answers
        }
        return [items[index] for index in range(len(numbered))]

    def _item(self, numbered: NumberedQuestion, answer: AnswerLogits) -> Row:
        true, forced = self.true[numbered.number], answer.likelihood(numbered.question)
        same = true.argmax(-1) == answer.logits.argmax(-1)
        return numbered.item() | {
            "exact": forced.exact,
            "log_likelihood": round(forced.log_likelihood, 4),
            "kl": round(float(kl_divergence(true, answer.logits).mean()), 5),
            "same": round(float(same.float().mean()), 4),
            "counts": bool(numbered.question.answer),
        }


Part = AnswerKl
