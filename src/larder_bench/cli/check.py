"""`larder bench --check`: committed rows against the same cells measured now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import typer

from larder.cli.errors import SCHEMA, print_document
from larder.core import LarderError, MissingWeights, UsageError
from larder.models import PACKAGED_MODELS
from larder_bench.cli.bench_options import BenchOptions, context_loader
from larder_bench.execution.committed_rows import (
    CheckedCell,
    cheapest_cells,
    check_cell,
    rounding_of,
)
from larder_bench.reports.study_index import RESULTS
from larder_bench.results.environment import environment_row
from larder_bench.results.rows import read_results, rows_file
from larder_bench.studies.study import read_study, study_names

SHOWN = 5  # differences of a cell


@dataclass(frozen=True)
class StudyCheck:
    """Outcome of one study.

    Args:
        cell: policy, budget and task of the cell; empty if it was skipped.
        differences: of the committed row and the measured one.
        comparison: how both were compared.
        skipped: why nothing was measured; else empty.
        untrained: policies of cheaper cells whose weights were not trained here, with the reason.
    """

    study: str
    cell: str
    seconds: float
    differences: tuple[str, ...] = ()
    skipped: str = ""
    comparison: str = ""
    untrained: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """Verdict in one word or with the reason."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        return "differs" if self.differences else "equal"


def check_studies(options: BenchOptions, tasks: list[str]) -> None:
    """Check the study of the options, or all with committed rows of packaged models.

    Raises:
        UsageError: tasks are named; a check takes a whole study.
        Exit: with 1 if a row differs, or nothing could be measured.
    """
    if tasks:
        raise UsageError("--check compares committed rows: name a study, no task.")
    names = [options.study] if options.study is not None else list(_packaged_studies())
    done = list[StudyCheck]()
    for name in names:
        found = _check(name, options)
        done.append(found)
        if not options.json:
            _print(found)
    if options.json:
        print_document({"schema": SCHEMA, "checks": [_record(one) for one in done]})
    if any(one.differences for one in done) or all(one.skipped for one in done):
        raise typer.Exit(1)


def _packaged_studies() -> Iterator[str]:
    """Studies with committed rows on models that can be installed as packages."""
    for name in study_names():
        models = read_study(name).models
        if rows_file(RESULTS, name).is_file() and set(models) <= set(PACKAGED_MODELS):
            yield name


def _check(name: str, options: BenchOptions) -> StudyCheck:
    started, untrained = perf_counter(), list[str]()
    try:
        checked = _first_checked(name, options, untrained)
    except LarderError as error:
        reason, seconds = str(error), perf_counter() - started
        return StudyCheck(name, "", seconds, skipped=reason, untrained=tuple(untrained))
    row = checked.row
    what = f"{row['policy']} at {row['budget']}, {row['task']}, {row['model']}"
    seconds, comparison = perf_counter() - started, checked.rounding.comparison
    left = tuple(untrained)
    return StudyCheck(name, what, seconds, checked.differences, "", comparison, left)


def _first_checked(name: str, options: BenchOptions, untrained: list[str]) -> CheckedCell:
    """Check of the cheapest cell whose policy has its weights here.

    Args:
        untrained: the policies of cheaper cells are added to it, each with the reason.

    Raises:
        MissingWeights: no policy has its weights.
        LarderError: there are no rows, or the model or a source is missing.
    """
    from torch import set_num_threads

    study = read_study(name)
    results = read_results([rows_file(RESULTS, study.name)])
    choices = cheapest_cells(study, results.cells, options.policy or ())
    for cell, row in choices:
        origin = results.environments.get(row.get("environment", ""), {})
        set_num_threads(threads := origin.get("threads", 1))
        rounding = rounding_of(origin, environment_row(threads))
        loader = context_loader(study, replace(options, dtype=options.dtype or row.get("dtype")))
        try:
            return check_cell(cell, row, loader, rounding)
        except MissingWeights as error:
            untrained.append(f"{row['policy']}: {error}")
    raise MissingWeights(f"None of the policies of {name} has its weights here.")


def _print(one: StudyCheck) -> None:
    cell = f" ({one.cell})" if one.cell else ""
    print(f"{one.study}{cell}: {one.outcome}, {one.seconds:.0f} s", flush=True)
    for reason in one.untrained:
        print(f"    not measured: {reason}")
    if one.comparison:
        print(f"    compared {one.comparison}")
    for difference in one.differences[:SHOWN]:
        print(f"    {difference}")
    if (more := len(one.differences) - SHOWN) > 0:
        print(f"    and {more} more")


def _record(one: StudyCheck) -> dict[str, Any]:
    return {
        "study": one.study,
        "cell": one.cell,
        "outcome": one.outcome,
        "comparison": one.comparison,
        "differences": list(one.differences),
        "untrained": list(one.untrained),
        "seconds": round(one.seconds, 2),
    }
