"""Checks of committed rows in several processes of one thread each.

Checks are grouped by model and conversation, so that one load and one full reading serve all checks
of a group. Of two processes one takes groups from the front of the order of models and the other
from its end: so few models are loaded twice, and both end at about the same time.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

from larder_bench.execution.committed_rows import PlannedCheck

Outcome = TypeVar("Outcome")
Item = TypeVar("Item")
CheckGroup = tuple[PlannedCheck, ...]
ENDS = 2  # of a queue that processes take groups from


def grouped(checks: Sequence[PlannedCheck]) -> list[CheckGroup]:
    """Groups of one model and conversation in the order of models: the one that takes longest is in
    the middle, so that both processes come to it, and of its groups the shortest.
    """
    ordered = sorted(checks, key=lambda check: check.context)
    groups = [tuple(group) for _, group in groupby(ordered, key=lambda check: check.context)]
    models = [list(found) for _, found in groupby(groups, key=lambda one: one[0].context[0])]
    by_cost = sorted(models, key=lambda model: -sum(map(_seconds, model)))
    return [
        group for model in _outwards(by_cost) for group in _outwards(sorted(model, key=_seconds))
    ]


def _outwards(items: Sequence[Item]) -> list[Item]:
    """Items from the middle to both ends."""
    return [*reversed(items[1::2]), *items[::2]]


def _seconds(group: CheckGroup) -> float:
    return sum(check.seconds for check in group)


@dataclass(frozen=True)
class CheckQueue(Generic[Outcome]):
    """Groups and the function that runs one, in as many processes as there are ends.

    Args:
        run: function that can be pickled.
    """

    groups: Sequence[CheckGroup]
    run: Callable[[CheckGroup], list[Outcome]]

    def outcomes(self) -> Iterator[Outcome]:
        """Outcomes of all groups as they become ready."""
        left = deque(self.groups)
        context = multiprocessing.get_context("spawn")
        pools = [ProcessPoolExecutor(1, context) for _ in range(min(ENDS, len(left)))]
        takes = (left.popleft, left.pop)
        running: dict[Future[list[Outcome]], int] = {}
        try:
            for end, pool in enumerate(pools):
                running[pool.submit(self.run, takes[end]())] = end
            while running:
                ready, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ready:
                    end = running.pop(future)
                    if left:
                        running[pools[end].submit(self.run, takes[end]())] = end
                    yield from future.result()
        finally:
            for pool in pools:
                pool.shutdown(wait=False, cancel_futures=True)


def timed(function: Callable[[], Outcome]) -> tuple[Outcome, float, float]:
    """Result of a function, its seconds and the processor's seconds of this process."""
    started, used = time.perf_counter(), time.process_time()
    result = function()
    return result, time.perf_counter() - started, time.process_time() - used
