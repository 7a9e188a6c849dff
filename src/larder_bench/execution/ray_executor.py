"""Cells of a study measured on all machines of a Ray cluster at the same time.

Plain actors instead of Ray Data: a worker keeps its model and the caches of a conversation, each
row is returned as soon as it is ready, and some cells wait for others (see `CellGroup`). Ray Data's
batched map supports none of that. Only this process writes the file.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from larder.core import LarderError, ModelError, cpu_counts
from larder_bench.execution.measured_cells import MeasuredCells
from larder_bench.execution.resumable_run import measure_timed
from larder_bench.execution.runner import ContextLoader, ExecutionStrategy, measure_cell
from larder_bench.results.environment import environment_row
from larder_bench.results.rows import Row
from larder_bench.studies.cells import Cell

MAX_LOST_WORKERS = 3  # consecutive lost workers after which the study stops
MeasuredCellRow = tuple[int, Row, float]  # number of a cell, its row, seconds


def ray_execution(open: ContextLoader, threads: int) -> ExecutionStrategy:
    """Execution strategy that measures cells on all machines of the joined Ray cluster.

    Args:
        open: loads a model by name, on workers as well as in this process.
        threads: torch threads of each worker.
    """

    def executor(
        model: str, rows: Sequence[Row], on_environment: Callable[[Row], None]
    ) -> RayExecutor:
        return RayExecutor(open, model, threads, rows, on_environment)

    return executor


class CellWorker:
    """Worker that holds a model and measures its cells.

    Args:
        threads: torch threads.
    """

    def __init__(self, open: ContextLoader, model: str, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._threads = threads
        self._context = lru_cache(maxsize=1)(lambda: open(model))

    def measure(
        self, cells: Sequence[tuple[int, Cell]], rows: Sequence[Row]
    ) -> Iterator[Row | MeasuredCellRow]:
        """Yield the environment row of this worker, then the result of each cell in order.

        Args:
            rows: results of other cells that these may depend on.
        """
        bench, known = self._context(), MeasuredCells(rows)
        yield environment_row(self._threads, bench.accelerator())
        for number, cell in cells:
            yield number, *measure_timed(lambda cell: measure_cell(bench, known, cell), cell)


@dataclass
class _RunningGroup:
    """Group of cells that a worker measures.

    Args:
        stream: results of the worker, a Ray generator.
        remaining: numbers of the cells without a row yet.
        environment: id of the worker's environment row.
    """

    worker: Any
    group: CellGroup
    stream: Any
    remaining: list[int]
    environment: str = ""


class RayExecutor:
    """Executor of one model's cells on Ray workers, as `run_in_order` is in this process.

    Args:
        rows: results of these cells that are already in the file.
        on_environment: called with the environment row of each worker.
    """

    def __init__(
        self,
        open: ContextLoader,
        model: str,
        threads: int,
        rows: Sequence[Row],
        on_environment: Callable[[Row], None],
    ) -> None:
        import ray  # pyright: ignore

        self._ray, self._on_environment = ray, on_environment
        self._known, self._rows = MeasuredCells(rows), dict[TaskLength, list[Row]]()
        for row in rows:
            self._keep(row)
        kind = ray.remote(CellWorker).options(num_cpus=threads)
        self._create_worker = lambda: kind.remote(open, model, threads)
        self._num_workers = max(1, sum(int(count // threads) for count in cpu_counts()))
        self._idle: list[Any] = []
        self._running: list[_RunningGroup] = []
        self._lost = 0

    def __call__(
        self, cells: Sequence[Cell], measure: Callable[[Cell], Row]
    ) -> Generator[tuple[Cell, Row, float], None, None]:
        """Yield results of cells as they become ready.

        Raises:
            LarderError: a worker cannot load the model.
            ModelError: several workers in a row are lost.
        """
        groups = group_by_conversation(cells)
        try:
            while groups or self._running:
                self._start(groups, cells)
                task = self._wait_for_result()
                for number, row, seconds in self._next_result(task, groups):
                    row["environment"] = task.environment
                    self._known.learn(cells[number], row)
                    self._keep(cells[number].head({}) | row)
                    yield cells[number], row, seconds
        finally:
            for worker in (*self._idle, *(task.worker for task in self._running)):
                self._ray.kill(worker)

    def _start(self, groups: list[CellGroup], cells: Sequence[Cell]) -> None:
        """Give each free worker a group of cells that does not have to wait."""
        while len(self._running) < self._num_workers:
            running = [task.group for task in self._running]
            group = next_ready_group(groups, running, cells, self._known)
            if group is None:
                return
            groups.remove(group)
            worker = self._idle.pop() if self._idle else self._create_worker()
            numbered = [(number, cells[number]) for number in group.numbers]
            stream = worker.measure.options(num_returns="streaming")
            results = stream.remote(numbered, rows_for_group(group, self._rows))
            self._running.append(_RunningGroup(worker, group, results, list(group.numbers)))

    def _wait_for_result(self) -> _RunningGroup:
        """Wait for a running group that has a result."""
        [ready], _ = self._ray.wait([task.stream for task in self._running], num_returns=1)
        return next(task for task in self._running if task.stream is ready)

    def _next_result(
        self, task: _RunningGroup, groups: list[CellGroup]
    ) -> Iterator[MeasuredCellRow]:
        """Next result of a task. A finished task frees its worker; the cells of a lost worker are
        queued again.
        """
        try:
            result = self._ray.get(next(task.stream))
        except StopIteration:
            self._running.remove(task)
            self._idle.append(task.worker)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, LarderError) else error) from None
        except self._ray.exceptions.RayError as error:
            self._running.remove(task)
            groups.insert(0, replace(task.group, numbers=tuple(task.remaining)))
            self._lost += 1
            if self._lost >= MAX_LOST_WORKERS:
                raise ModelError(
                    f"{MAX_LOST_WORKERS} workers in a row were lost ({type(error).__name__}): "
                    "check that the machines have enough memory for the model, then run the same "
                    "command again to resume."
                ) from error
        else:
            if isinstance(result, dict):
                task.environment = result["id"]
                self._on_environment(result)
                return
            self._lost = 0
            task.remaining.remove(result[0])
            yield result

    def _keep(self, row: Row) -> None:
        self._rows.setdefault((str(row["task"]), str(row["tokens"])), []).append(row)


TaskLength = tuple[str, ...]  # task and length


@dataclass(frozen=True)
class CellGroup:
    """Cells of one conversation, in order.

    Args:
        where: task and length.
        numbers: indices among all cells to measure.
    """

    where: TaskLength
    seed: int
    numbers: tuple[int, ...]


def group_by_conversation(cells: Sequence[Cell]) -> list[CellGroup]:
    """Cells grouped by conversation, in order of first appearance."""
    numbers: dict[tuple[TaskLength, int], list[int]] = {}
    for index, cell in enumerate(cells):
        numbers.setdefault((cell.setting[:2], cell.seed), []).append(index)
    return [CellGroup(where, seed, tuple(each)) for (where, seed), each in numbers.items()]


def next_ready_group(
    groups: Sequence[CellGroup],
    running: Sequence[CellGroup],
    cells: Sequence[Cell],
    known: MeasuredCells,
) -> CellGroup | None:
    """First group that does not have to wait for another seed; None if all have to."""
    for group in groups:
        others = (*groups, *running)
        before = [each.seed for each in others if each.where == group.where]
        first = min(before)
        if first == group.seed or _is_settled([cells[n] for n in group.numbers], first, known):
            return group
    return None


def rows_for_group(group: CellGroup, rows: Mapping[TaskLength, Sequence[Row]]) -> list[Row]:
    """Rows of other cells that the results of this group can depend on."""
    return [row for row in rows.get(group.where, ()) if row["seed"] <= group.seed]


def _is_settled(cells: Sequence[Cell], first: int, known: MeasuredCells) -> bool:
    """Test if all guesses come from seeds before the first that is not measured yet."""
    sources = (known.source(cell) for cell in cells if cell.amount is not None)
    return all(seed is not None and seed < first for seed in sources)
