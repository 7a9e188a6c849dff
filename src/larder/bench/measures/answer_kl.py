"""How far what is expected at each token of the right answers is from what the full cache expects.

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

from larder.bench.cells import Cell
from larder.bench.divergence import divergence
from larder.bench.forced import Answered, answered, answered_slowly
from larder.bench.marking import Posed
from larder.bench.measures.base import Measure
from larder.bench.rows import Row
from larder.bench.sittings import Readings, sit
from larder.bench.task import Style
from larder.bench.workbench import Workbench
from larder.core.errors import UsageError
from larder.core.spelling import name_of
from larder.engine.engine import Engine
from larder.session.memory import Memory


@dataclass(frozen=True)
class AnswerKl(Measure):
    """The full cache's expectations at the answers, and how many nats a policy is from them."""

    def measure(self, bench: Workbench, cell: Cell, guess: float | None) -> Row:
        if cell.task.style not in (Style.INDEPENDENT, Style.RECITAL):
            raise UsageError(
                f"Questions of {name_of(type(cell.task))} stand behind each other, and answer_kl "
                "asks each by itself: take a task whose questions stand alone, or forced."
            )
        readings = Readings.of(bench, cell, guess)
        items = sit(readings, cell.task, _Comparing(bench.expected(readings.conversation)))
        return readings.figures() | {"items": items}


@dataclass(frozen=True)
class _Comparing:
    """Asks, and compares with what the full cache expected.

    Args:
        true: by number of the question, the full cache's logits at each token of its answer.
    """

    true: Mapping[int, Float[Tensor, "N V"]]

    def ask(self, engine: Engine, memory: Memory, posed: Sequence[Posed]) -> list[Row]:
        """One item per question."""
        recalls = memory.policy.recall is not None
        asked = (answered_slowly if recalls else answered)(
            engine, memory, [one.question for one in posed]
        )
        items = {one.place: self._item(posed[one.place], one) for one in asked}
        return [items[place] for place in range(len(posed))]

    def _item(self, posed: Posed, found: Answered) -> Row:
        true, forced = self.true[posed.number], found.forced(posed.question)
        same = true.argmax(-1) == found.logits.argmax(-1)
        return posed.item() | {
            "exact": forced.exact,
            "log_likelihood": round(forced.log_likelihood, 4),
            "kl": round(float(divergence(true, found.logits).mean()), 5),
            "same": round(float(same.float().mean()), 4),
            "counts": bool(posed.question.answer),
        }


Part = AnswerKl
