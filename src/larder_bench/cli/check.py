"""`larder bench --check`: committed rows against the same cells measured now."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import typer

from larder.cli.errors import SCHEMA, print_document
from larder.core import LarderError, MissingWeights, UsageError
from larder_bench.cli.bench_options import BenchOptions, context_loader, load_engine
from larder_bench.execution.check_queue import CheckGroup, CheckQueue, grouped, timed
from larder_bench.execution.committed_rows import (
    CheckedCell,
    PlannedCheck,
    cheapest_check,
    check_cell,
    rounding_of,
)
from larder_bench.reports.study_index import RESULTS
from larder_bench.results.environment import environment_row
from larder_bench.results.rows import Row, read_results, rows_file
from larder_bench.studies.study import read_study, study_names

if TYPE_CHECKING:
    from larder_bench.studies.model_context import ModelContext

SHOWN = 5  # differences of a cell
ROUNDINGS = RESULTS.parent / "roundings.json"  # means of checks under several kernels
_CONTEXTS: dict[tuple[object, ...], ModelContext] = {}


@dataclass(frozen=True)
class StudyCheck:
    """Outcome of one study.

    Args:
        cell: policy, budget and task of the cell; empty if it was skipped.
        seconds, cpu_seconds: of this check; what checks share counts for the first of them.
        checked: the compared rows; None if nothing was measured.
        skipped: why nothing was measured; else empty.
        label: the same for equal checks.
        untrained: policies of cheaper cells whose weights were not trained here, with the reason.
    """

    study: str
    cell: str
    seconds: float
    cpu_seconds: float = 0.0
    checked: CheckedCell | None = None
    skipped: str = ""
    label: str = ""
    untrained: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[str, ...]:
        """Differences of the committed row and the measured one."""
        return () if self.checked is None else self.checked.differences

    @property
    def outcome(self) -> str:
        """Verdict in one word or with the reason."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        return "differs" if self.differences else "equal"

    @property
    def largest(self) -> float:
        """Largest difference of means as a share of what is allowed."""
        deviation = None if self.checked is None else self.checked.largest
        return 0.0 if deviation is None else deviation.share


def check_studies(options: BenchOptions, tasks: list[str]) -> None:
    """Check the study of the options, or all that have committed rows.

    Raises:
        UsageError: tasks are named; a check takes a whole study.
        Exit: with 1 if a row differs, or nothing could be measured.
    """
    if tasks:
        raise UsageError("--check compares committed rows: name a study, no task.")
    names = [options.study] if options.study is not None else list(_measured_studies(options.model))
    done, started, used = list[StudyCheck](), time.perf_counter(), time.process_time()
    for found in _checks(names, options):
        done.append(found)
        if not options.json:
            _print(found)
    seconds = time.perf_counter() - started
    cpu = time.process_time() - used + sum(one.cpu_seconds for one in done) * (len(names) > 1)
    if options.json:
        checks = [_record(one) for one in done]
        totals = {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2)}
        print_document({"schema": SCHEMA, "checks": checks, **totals})
    elif len(names) > 1:
        _print_summary(done, seconds, cpu)
    if any(one.differences for one in done) or all(one.skipped for one in done):
        raise typer.Exit(1)


def _measured_studies(models: Sequence[str] | None) -> Iterator[str]:
    """Studies that have committed rows, of these models alone; None for all."""
    for name in study_names():
        if rows_file(RESULTS, name).is_file() and (
            models is None or set(read_study(name).models) <= set(models)
        ):
            yield name


def _checks(names: Sequence[str], options: BenchOptions) -> Iterator[StudyCheck]:
    """Outcomes of all studies, those that cannot be planned first."""
    planned, skipped = list[PlannedCheck](), list[StudyCheck]()
    origins: dict[str, Row] = {}
    for name in names:
        try:
            study = read_study(name)
            results = read_results([rows_file(RESULTS, study.name)])
            check = cheapest_check(study, results.cells, options.policy or ())
        except LarderError as error:
            skipped.append(StudyCheck(name, "", 0.0, skipped=str(error)))
            continue
        planned.append(check)
        origins |= results.environments
    run = partial(_check_group, options=options, origins=origins)
    groups = grouped(planned)
    if len(planned) > 1:
        return chain(skipped, CheckQueue(groups, run).outcomes())
    return chain(skipped, *map(run, groups))


def _check_group(
    group: CheckGroup, options: BenchOptions, origins: dict[str, Row]
) -> list[StudyCheck]:
    """Checks of one model and conversation, in this process."""
    return [_check(check, options, origins) for check in group]


def _check(planned: PlannedCheck, options: BenchOptions, origins: dict[str, Row]) -> StudyCheck:
    """Check of the first policy that has its weights here."""
    untrained = list[str]()

    def measure() -> CheckedCell | LarderError:
        for choice in (planned, *planned.others):
            try:
                return _checked(choice, options, origins.get(choice.row.get("environment", ""), {}))
            except MissingWeights as error:
                untrained.append(f"{choice.row['policy']}: {error}")
            except LarderError as error:
                return error
        return MissingWeights(f"None of the policies of {name} has its weights here.")

    name = planned.cell.study
    checked, seconds, cpu = timed(measure)
    if isinstance(checked, LarderError):
        reason = str(checked)
        return StudyCheck(name, "", seconds, cpu, skipped=reason, untrained=tuple(untrained))
    used = (planned, *planned.others)[len(untrained)]
    row = used.row
    asked = "" if used.asked is None else f", {used.asked} of its questions"
    what = f"{row['policy']} at {row['budget']}, {row['task']}, {row['model']}{asked}"
    label = check_label(used)
    return StudyCheck(name, what, seconds, cpu, checked, label=label, untrained=tuple(untrained))


def _checked(planned: PlannedCheck, options: BenchOptions, origin: Row) -> CheckedCell:
    """Result of measuring a planned check again; see `check_cell`."""
    from torch import set_num_threads

    row = planned.row
    set_num_threads(threads := origin.get("threads", 1))
    rounding = rounding_of(origin, environment_row(threads))
    of_row = replace(options, dtype=options.dtype or row.get("dtype"))

    def load(model: str) -> ModelContext:
        return _context(model, row.get("wording", ""), of_row)

    return check_cell(planned, load, rounding, known_means(planned))


def known_means(planned: PlannedCheck) -> dict[str, list[float]] | None:
    """Means of a check under several roundings, by field, and of the row when these were measured;
    None if they were not.
    """
    if not ROUNDINGS.is_file():
        return None
    found = _roundings().get(planned.cell.study, {})
    if found.get("check") != check_label(planned):
        return None
    means: dict[str, list[float]] = {}
    for own in (*found["kernels"].values(), found["committed"]):
        for field, mean in own.items():
            means.setdefault(field, []).append(mean)
    return means


def check_label(planned: PlannedCheck) -> str:
    """Text that is the same for equal checks."""
    row, names = planned.row, ("task", "tokens", "seed", "policy", "budget", "matched", "measure")
    return ", ".join([*(str(row[name]) for name in names), f"asked {planned.asked or 'all'}"])


@cache
def _roundings() -> dict[str, Any]:
    return json.loads(ROUNDINGS.read_text())


_engine = cache(load_engine)


def _context(model: str, wording: str, options: BenchOptions) -> ModelContext:
    """Context of a model, which all checks of this process share."""
    key = (model, wording, options.dtype, options.device)
    if key not in _CONTEXTS:
        from larder_bench.studies.study import Study, StudyTask

        study = Study(name="check", tasks=(StudyTask("passkey", (1000,)),), wording=wording)
        _CONTEXTS[key] = context_loader(study, options, _engine)(model)
    return _CONTEXTS[key]


def _print(one: StudyCheck) -> None:
    cell = f" ({one.cell})" if one.cell else ""
    print(
        f"{one.study}{cell}: {one.outcome}, {one.seconds:.0f} s, "
        f"{one.cpu_seconds:.1f} s of the processor",
        flush=True,
    )
    for reason in one.untrained:
        print(f"    not measured: {reason}")
    if one.checked is None:
        return
    print(f"    compared {one.checked.rounding.comparison}")
    if one.checked.largest is not None:
        print(f"    largest difference: {one.checked.largest}")
    for difference in one.differences[:SHOWN]:
        print(f"    {difference}")
    if (more := len(one.differences) - SHOWN) > 0:
        print(f"    and {more} more")


def _print_summary(done: Sequence[StudyCheck], seconds: float, cpu: float) -> None:
    compared = [one for one in done if not one.skipped]
    different = [one for one in compared if one.differences]
    print(
        f"{len(compared)} of {len(done)} studies compared, {len(different)} differ; "
        f"{seconds:.0f} s, {cpu:.0f} s of the processor."
    )
    if compared and (worst := max(compared, key=lambda one: one.largest)).largest > 0:
        assert worst.checked is not None
        print(f"Largest difference: {worst.study}, {worst.checked.largest}.")


def _record(one: StudyCheck) -> dict[str, Any]:
    checked = one.checked
    return {
        "study": one.study,
        "cell": one.cell,
        "check": one.label,
        "outcome": one.outcome,
        "comparison": "" if checked is None else checked.rounding.comparison,
        "differences": list(one.differences),
        "untrained": list(one.untrained),
        "means": {} if checked is None else dict(checked.means or {}),
        "committed_means": {} if checked is None else dict(checked.committed or {}),
        "largest_difference": round(one.largest, 4),
        "seconds": round(one.seconds, 2),
        "cpu_seconds": round(one.cpu_seconds, 2),
    }
