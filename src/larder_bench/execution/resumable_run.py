"""Measure what no line of a file holds yet, one thing after the other, and keep each at once.

Stopped at any moment, a file holds every row that was finished; run again, only the rest is
measured. That a policy refuses is a result, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from larder.core.errors import LarderError
from larder_bench.results.rows import (
    ENVIRONMENT,
    EXHIBITS,
    PAPER,
    Row,
    append_rows,
    existing_rows,
    split_exhibits,
)

Job = TypeVar("Job")
Kind = TypeVar("Kind", bound=Hashable)  # of jobs that take about as long


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run.

    Args:
        done, total: jobs of this run, those already in the file left out.
        seconds: since the run began.
    """

    done: int
    total: int
    seconds: float

    @property
    def left_seconds(self) -> float:
        """Estimated remaining seconds."""
        return self.seconds / self.done * (self.total - self.done) if self.done else 0.0


ProgressCallback = Callable[[Row, RunProgress], None]  # called with each new row


def ignore_progress(row: Row, pace: RunProgress) -> None:
    """For who does not watch."""
    del row, pace


# What jobs came to and the seconds that it took, as they become ready.
MeasuredJobs = Generator[tuple[Job, Row, float], None, None]
JobExecutor = Callable[[Sequence[Job], Callable[[Job], Row]], MeasuredJobs[Job]]


def run_in_order(jobs: Sequence[Job], measure: Callable[[Job], Row]) -> MeasuredJobs[Job]:
    """One job after the other, here."""
    for job in jobs:
        yield job, *measure_timed(measure, job)


@dataclass(frozen=True)
class ResumableRun(Generic[Job]):
    """Jobs and the file that their rows go to.

    Args:
        jobs: in the order in which they are measured.
        head: what the row of a job starts with, known before it is measured.
        key: by which a row is found again; of a head as of a whole row.
        measure: the rest of the row.
        out: lines of JSON.
        common: what every row ends with.
        each: measures jobs one after the other, or several at a time.
    """

    jobs: Sequence[Job]
    head: Callable[[Job], Row]
    key: Callable[[Row], Hashable]
    measure: Callable[[Job], Row]
    out: Path
    common: Row
    each: JobExecutor[Job] = run_in_order

    def left(self) -> list[Job]:
        """The jobs that the file has no row of."""
        known = {self.key(row) for row in existing_rows(self.out) if _is_job_row(row)}
        return [job for job in self.jobs if self.key(self.head(job)) not in known]

    def go(self, tell: ProgressCallback = ignore_progress) -> None:
        """Measure them; each row is in the file before the next job begins, behind its exhibits."""
        left, begun = self.left(), time.perf_counter()
        with closing(self.each(left, self.measure)) as all_measured:
            for number, (job, measured, seconds) in enumerate(all_measured, start=1):
                rows = split_exhibits(self._row(job, measured, seconds))
                append_rows(self.out, rows)
                tell(rows[-1], RunProgress(number, len(left), time.perf_counter() - begun))

    def _row(self, job: Job, measured: Row, seconds: float) -> Row:
        return self.head(job) | measured | {"seconds": round(seconds, 3)} | self.common


def measure_timed(measure: Callable[[Job], Row], job: Job) -> tuple[Row, float]:
    """What was measured, or why nothing was, and how many seconds that took."""
    started = time.perf_counter()
    try:
        measured = measure(job)
    except LarderError as error:
        measured = {"refused": " ".join(str(error).split())}
    return measured, time.perf_counter() - started


def estimate_seconds(
    jobs: Sequence[Job], group: Callable[[Job], Kind], measure: Callable[[Job], Row]
) -> dict[Kind, float]:
    """Seconds that all jobs of each group would take, from the one in the middle of it."""
    groups: dict[Kind, list[Job]] = {}
    for job in jobs:
        groups.setdefault(group(job), []).append(job)
    return {
        name: measure_timed(measure, mine[len(mine) // 2])[1] * len(mine)
        for name, mine in groups.items()
    }


def _is_job_row(row: Row) -> bool:
    """Whether it tells of a job, and not of surroundings or a paper, nor for a figure alone."""
    return row.get("row") not in (ENVIRONMENT, PAPER, *EXHIBITS)
