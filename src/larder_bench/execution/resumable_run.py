"""Resumable runs: measure the jobs that a file of rows does not hold yet, and write each row at
once.

An interrupted run leaves every finished row in the file; the next run measures only the rest. A
refusal by a policy is a result, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from larder.core import LarderError
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
Kind = TypeVar("Kind", bound=Hashable)  # of jobs with about the same duration


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run.

    Args:
        done, total: jobs of this run without those already in the file.
        seconds: elapsed time of the run.
    """

    done: int
    total: int
    seconds: float

    @property
    def left_seconds(self) -> float:
        """Estimated remaining seconds."""
        return self.seconds / self.done * (self.total - self.done) if self.done else 0.0


ProgressCallback = Callable[[Row, RunProgress], None]  # called with each new row


def ignore_progress(row: Row, progress: RunProgress) -> None:
    """Ignore progress: the default callback."""
    del row, progress


# Jobs, their results and durations in seconds, as they become ready.
MeasuredJobs = Generator[tuple[Job, Row, float], None, None]
JobExecutor = Callable[[Sequence[Job], Callable[[Job], Row]], MeasuredJobs[Job]]


def run_in_order(jobs: Sequence[Job], measure: Callable[[Job], Row]) -> MeasuredJobs[Job]:
    """Measure one job after the other in this process."""
    for job in jobs:
        yield job, *measure_timed(measure, job)


@dataclass(frozen=True)
class ResumableRun(Generic[Job]):
    """Jobs and the file that their rows are written to.

    Args:
        jobs: jobs in the order in which they are measured.
        head: first fields of a job's row, known before it is measured.
        key: unique key of a row, computed from a head or a whole row.
        measure: remaining fields of the row.
        out: file of JSON lines.
        common: last fields of every row.
        executor: measures jobs one after the other, or several at a time.
    """

    jobs: Sequence[Job]
    head: Callable[[Job], Row]
    key: Callable[[Row], Hashable]
    measure: Callable[[Job], Row]
    out: Path
    common: Row
    executor: JobExecutor[Job] = run_in_order

    def remaining(self) -> list[Job]:
        """Jobs without a row in the file."""
        known = {self.key(row) for row in existing_rows(self.out) if _is_job_row(row)}
        return [job for job in self.jobs if self.key(self.head(job)) not in known]

    def run(self, on_row: ProgressCallback = ignore_progress) -> None:
        """Measure the remaining jobs. Each row is in the file, after its exhibits, before the next
        job starts.
        """
        remaining, started = self.remaining(), time.perf_counter()
        with closing(self.executor(remaining, self.measure)) as results:
            for number, (job, measured, seconds) in enumerate(results, start=1):
                rows = split_exhibits(self._row(job, measured, seconds))
                append_rows(self.out, rows)
                on_row(rows[-1], RunProgress(number, len(remaining), time.perf_counter() - started))

    def _row(self, job: Job, measured: Row, seconds: float) -> Row:
        return self.head(job) | measured | {"seconds": round(seconds, 3)} | self.common


def measure_timed(measure: Callable[[Job], Row], job: Job) -> tuple[Row, float]:
    """Measure a job: the measured fields, or the reason of a refusal, and the duration in
    seconds.
    """
    started = time.perf_counter()
    try:
        measured = measure(job)
    except LarderError as error:
        measured = {"refused": " ".join(str(error).split())}
    return measured, time.perf_counter() - started


def estimate_seconds(
    jobs: Sequence[Job], group: Callable[[Job], Kind], measure: Callable[[Job], Row]
) -> dict[Kind, float]:
    """Estimated seconds of all jobs by group, extrapolated from the middle job of each group."""
    groups: dict[Kind, list[Job]] = {}
    for job in jobs:
        groups.setdefault(group(job), []).append(job)
    return {
        name: measure_timed(measure, group_jobs[len(group_jobs) // 2])[1] * len(group_jobs)
        for name, group_jobs in groups.items()
    }


def _is_job_row(row: Row) -> bool:
    """Test if a row belongs to a job: not an environment, a paper or an exhibit."""
    return row.get("row") not in (ENVIRONMENT, PAPER, *EXHIBITS)
