"""KL divergence from the full cache at each token of the right answers.

KL(full || policy) in nats per token, end of turn included, beside exact match and log-likelihood.
M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, figure 4b, compares ways to divide a
budget among layers by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from larder.core.errors import UsageError
from larder.core.spelling import name_of
from larder.engine.engine import Engine
from larder.session.memory import ConversationMemory
from larder_bench.measures.base import Measure
from larder_bench.results.rows import Row
from larder_bench.scoring.item_scores import NumberedQuestion
from larder_bench.scoring.kl_divergence import kl_divergence
from larder_bench.scoring.teacher_forcing import AnswerLogits, answer_logits, answer_logits_stepwise
from larder_bench.studies.cells import Cell
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.question_sequences import ContextReader, ask_all
from larder_bench.tasks.base import QuestionStyle


@dataclass(frozen=True)
class AnswerKl(Measure):
    """The full cache's expectations at the answers, and how many nats a policy is from them."""

    def measure(self, bench: ModelContext, cell: Cell, guess: float | None) -> Row:
        if cell.task.style not in (QuestionStyle.INDEPENDENT, QuestionStyle.RECITAL):
            raise UsageError(
                f"Questions of {name_of(type(cell.task))} stand behind each other, and answer_kl "
                "asks each by itself: take a task whose questions stand alone, or forced."
            )
        readings = ContextReader.of(bench, cell, guess)
        items = ask_all(readings, cell.task, _KlScorer(bench.expected(readings.conversation)))
        return readings.figures() | {"items": items}


@dataclass(frozen=True)
class _KlScorer:
    """Asks, and compares with what the full cache expected.

    Args:
        true: by number of the question, the full cache's logits at each token of its answer.
    """

    true: Mapping[int, Float[Tensor, "N V"]]

    def ask(
        self, engine: Engine, memory: ConversationMemory, posed: Sequence[NumberedQuestion]
    ) -> list[Row]:
        """One item per question."""
        recalls = memory.policy.recall is not None
        asked = (answer_logits_stepwise if recalls else answer_logits)(
            engine, memory, [one.question for one in posed]
        )
        items = {one.place: self._item(posed[one.place], one) for one in asked}
        return [items[place] for place in range(len(posed))]

    def _item(self, posed: NumberedQuestion, found: AnswerLogits) -> Row:
        true, forced = self.true[posed.number], found.likelihood(posed.question)
        same = true.argmax(-1) == found.logits.argmax(-1)
        return posed.item() | {
            "exact": forced.exact,
            "log_likelihood": round(forced.log_likelihood, 4),
            "kl": round(float(kl_divergence(true, found.logits).mean()), 5),
            "same": round(float(same.float().mean()), 4),
            "counts": bool(posed.question.answer),
        }


Part = AnswerKl
