"""Processor time of reading and of a decode step behind it.

Both are measured as `reading` and `decode` do, by the processor time of this process, all threads
together, so that other programs on the machine matter less. The row has the caches and the step of
`decode`, and the `prefill_seconds` of `reading`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from larder.core import BudgetUnit, MemoryBudget, require_at_least
from larder_bench.measures.base import Measure
from larder_bench.measures.decode import Decode
from larder_bench.measures.reading import Reading
from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.studies.cells import Cell
from larder_bench.studies.model_context import ModelContext


@dataclass(frozen=True)
class Cost(Measure):
    """Prefill of random tokens, and decode steps over filled caches.

    Args:
        steps: number of timed steps, after one warm-up step.
    """

    steps: int = 4

    def __post_init__(self) -> None:
        require_at_least(1, "cost", steps=self.steps)

    def is_alike(self, amount: MemoryBudget) -> bool:
        """A number of tokens has one meaning; shares and bytes depend on the matched quantity."""
        return amount.unit is BudgetUnit.TOKENS

    def measure(self, bench: ModelContext, cell: Cell, tokens_per_byte: float | None) -> Row:
        reading = Reading().timed(bench, cell, time.process_time)
        step = Decode(self.steps).timed(bench, cell, time.process_time)
        exhibits = [*reading[EXHIBITS_KEY], *step[EXHIBITS_KEY]]
        return step | {"prefill_seconds": reading["prefill_seconds"], EXHIBITS_KEY: exhibits}


Part = Cost
