"""Cells of a study measured on all machines of a Ray cluster at the same time.

Plain actors and not Ray Data: a worker keeps its model and what it has read of a conversation, each
row comes as soon as it is there, and some cells wait for others
(see `CellGroup`). A data set that is mapped in batches has an order for none
of that. Only this process writes the file.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from larder.core.errors import LarderError, ModelError
from larder.core.ray_cluster import cpu_counts
from larder_bench.execution.measured_cells import MeasuredCells
from larder_bench.execution.resumable_run import measure_timed
from larder_bench.execution.runner import ContextLoader, ExecutionStrategy, measure_cell
from larder_bench.results.environment import environment_row
from larder_bench.results.rows import Row
from larder_bench.studies.cells import Cell

MAX_LOST_WORKERS = 3  # workers in a row that may be lost before the study stops
MeasuredCellRow = tuple[int, Row, float]  # number of a cell, its row, seconds


def ray_execution(open: ContextLoader, threads: int) -> ExecutionStrategy:
    """Go through cells on all machines of the cluster that this process has joined.

    Args:
        open: loads the model of that name, there as well as here.
        threads: that each worker computes with.
    """

    def through(model: str, rows: Sequence[Row], tell: Callable[[Row], None]) -> RayExecutor:
        return RayExecutor(open, model, threads, rows, tell)

    return through


class CellWorker:
    """Worker that holds a model and measures its cells.

    Args:
        threads: that torch computes with.
    """

    def __init__(self, open: ContextLoader, model: str, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._threads = threads
        self._opened = lru_cache(maxsize=1)(lambda: open(model))

    def measure(
        self, cells: Sequence[tuple[int, Cell]], rows: Sequence[Row]
    ) -> Iterator[Row | MeasuredCellRow]:
        """Tell what rows depend on here, then measure cells in order.

        Args:
            rows: of others, which these may go by.
        """
        bench, known = self._opened(), MeasuredCells(rows)
        yield environment_row(self._threads, bench.accelerator())
        for number, cell in cells:
            yield number, *measure_timed(lambda cell: measure_cell(bench, known, cell), cell)


@dataclass
class _RunningGroup:
    """Cells on their way.

    Args:
        left: those that no row has come of.
        environment: of their rows.
    """

    worker: Any
    group: CellGroup
    told: Any
    left: list[int]
    environment: str = ""


class RayExecutor:
    """Measures the cells of one model elsewhere, as `running.in_order` does here.

    Args:
        rows: of these cells, as far as they are known.
        tell: called with the surroundings of each worker.
    """

    def __init__(
        self,
        open: ContextLoader,
        model: str,
        threads: int,
        rows: Sequence[Row],
        tell: Callable[[Row], None],
    ) -> None:
        import ray  # pyright: ignore

        self._ray, self._tell = ray, tell
        self._known, self._rows = MeasuredCells(rows), dict[TaskLength, list[Row]]()
        for row in rows:
            self._keep(row)
        kind = ray.remote(CellWorker).options(num_cpus=threads)
        self._made = lambda: kind.remote(open, model, threads)
        self._places = max(1, sum(int(count // threads) for count in cpu_counts()))
        self._idle: list[Any] = []
        self._running: list[_RunningGroup] = []
        self._lost = 0

    def __call__(
        self, cells: Sequence[Cell], measure: Callable[[Cell], Row]
    ) -> Generator[tuple[Cell, Row, float], None, None]:
        """Results of cells, as they become ready.

        Raises:
            LarderError: a worker cannot have the model.
            ModelError: workers are lost again and again.
        """
        del measure
        groups = group_by_conversation(cells)
        try:
            while groups or self._running:
                self._start(groups, cells)
                task = self._ready()
                for number, row, seconds in self._news(task, groups):
                    row["environment"] = task.environment
                    self._known.learn(cells[number], row)
                    self._keep(cells[number].head({}) | row)
                    yield cells[number], row, seconds
        finally:
            for worker in (*self._idle, *(task.worker for task in self._running)):
                self._ray.kill(worker)

    def _start(self, groups: list[CellGroup], cells: Sequence[Cell]) -> None:
        """Give every worker something to do, if there is something that need not wait."""
        while len(self._running) < self._places:
            running = [task.group for task in self._running]
            group = next_ready_group(groups, running, cells, self._known)
            if group is None:
                return
            groups.remove(group)
            worker = self._idle.pop() if self._idle else self._made()
            wanted = [(number, cells[number]) for number in group.numbers]
            stream = worker.measure.options(num_returns="streaming")
            told = stream.remote(wanted, rows_for_group(group, self._rows))
            self._running.append(_RunningGroup(worker, group, told, list(group.numbers)))

    def _ready(self) -> _RunningGroup:
        """One that has news."""
        [told], _ = self._ray.wait([task.told for task in self._running], num_returns=1)
        return next(task for task in self._running if task.told is told)

    def _news(self, task: _RunningGroup, groups: list[CellGroup]) -> Iterator[MeasuredCellRow]:
        """What a task tells; if it is over, its worker is idle, and what is left goes back."""
        try:
            news = self._ray.get(next(task.told))
        except StopIteration:
            self._running.remove(task)
            self._idle.append(task.worker)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, LarderError) else error) from None
        except self._ray.exceptions.RayError as error:
            self._running.remove(task)
            groups.insert(0, replace(task.group, numbers=tuple(task.left)))
            self._lost += 1
            if self._lost >= MAX_LOST_WORKERS:
                raise ModelError(
                    f"{MAX_LOST_WORKERS} workers in a row were lost ({type(error).__name__}): "
                    "see whether the "
                    "machines have memory for the model; the same command goes on from here."
                ) from error
        else:
            if isinstance(news, dict):
                task.environment = news["id"]
                self._tell(news)
                return
            self._lost = 0
            task.left.remove(news[0])
            yield news

    def _keep(self, row: Row) -> None:
        self._rows.setdefault((str(row["task"]), str(row["tokens"])), []).append(row)


TaskLength = tuple[str, ...]  # task and length


@dataclass(frozen=True)
class CellGroup:
    """Cells of one conversation, in order.

    Args:
        numbers: their places among all that are to be measured.
    """

    where: TaskLength
    seed: int
    numbers: tuple[int, ...]


def group_by_conversation(cells: Sequence[Cell]) -> list[CellGroup]:
    """Cells by conversation, in the order in which these come first."""
    found: dict[tuple[TaskLength, int], list[int]] = {}
    for number, cell in enumerate(cells):
        found.setdefault((cell.place[:2], cell.seed), []).append(number)
    return [CellGroup(where, seed, tuple(each)) for (where, seed), each in found.items()]


def next_ready_group(
    groups: Sequence[CellGroup],
    running: Sequence[CellGroup],
    cells: Sequence[Cell],
    known: MeasuredCells,
) -> CellGroup | None:
    """The first of those left that need not wait; None where all have to."""
    for group in groups:
        others = (*groups, *running)
        before = [each.seed for each in others if each.where == group.where]
        first = min(before)
        if first == group.seed or _is_settled([cells[n] for n in group.numbers], first, known):
            return group
    return None


def rows_for_group(group: CellGroup, rows: Mapping[TaskLength, Sequence[Row]]) -> list[Row]:
    """What is known of other cells, and can matter to these."""
    return [row for row in rows.get(group.where, ()) if row["seed"] <= group.seed]


def _is_settled(cells: Sequence[Cell], first: int, known: MeasuredCells) -> bool:
    """Whether all guesses come from seeds before the first that is not measured yet."""
    sources = (known.source(cell) for cell in cells if cell.amount is not None)
    return all(seed is not None and seed < first for seed in sources)
