"""Expected answers read as if they had been said: exact match of greedy decoding, log-likelihood.

All questions are read side by side in scratch mode. What is read so attends to everything that was
parked, so under a policy that recalls answers are read token by token on a fork instead; entries
that a policy would drop while it generates stay, or its answers could not be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from larder.bench.cells import Cell
from larder.bench.forced import force, force_slowly
from larder.bench.marking import Posed, forced_items
from larder.bench.measures.base import Measure
from larder.bench.rows import Row
from larder.bench.sittings import Readings, sit
from larder.bench.workbench import Workbench
from larder.engine.engine import Engine
from larder.session.memory import Memory


@dataclass(frozen=True)
class ForcedAnswers(Measure):
    """How likely the expected answers are."""

    def measure(self, bench: Workbench, cell: Cell, guess: float | None) -> Row:
        readings = Readings.of(bench, cell, guess)
        items = sit(readings, cell.task, self)
        return readings.figures() | {"items": items}

    def ask(self, engine: Engine, memory: Memory, posed: Sequence[Posed]) -> list[Row]:
        """The items of all these questions."""
        questions = [one.question for one in posed]
        recalls = memory.policy.recall is not None
        results = (force_slowly if recalls else force)(engine, memory, questions)
        pairs = zip(posed, results, strict=True)
        return [item for one, result in pairs for item in forced_items(one, result, engine.scribe)]


Part = ForcedAnswers
