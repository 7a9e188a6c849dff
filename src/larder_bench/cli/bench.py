"""`larder bench`: run a study given by command line options or by a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larder.cli.errors import INTERRUPTED_EXIT_CODE, SCHEMA, print_document
from larder.cli.options import command
from larder.core import UsageError
from larder_bench.cli.bench_options import BenchOptions, check_extra, context_loader

if TYPE_CHECKING:
    from larder_bench.execution.resumable_run import RunProgress
    from larder_bench.execution.runner import StudyRunner
    from larder_bench.results.rows import Row
    from larder_bench.studies.study import Study

Names = list[str]
RESULTS = Path("results")
NO_CONTROLS = "none"
DEFAULT_LENGTHS = (1500,)  # tokens
# Fields of a study's file that options may override.
OVERRIDABLE_FIELDS = {
    "model": "models",
    "files": "files",
    "budget": "budgets",
    "measure": "measure",
    "question": "question",
    "wording": "wording",
}
FIELD_OF_OPTION = {"policy": "policies", "control": "controls", **OVERRIDABLE_FIELDS}


@command
def bench(
    options: BenchOptions,
    task: Annotated[
        list[str] | None,
        typer.Argument(metavar="TASK...", help="Such as needles, or \"needles(kind='kv')\"."),
    ] = None,
) -> None:
    """Measure policies on TASK at equal bytes and equal tokens, or run a whole study.

    Rows go to a file of JSON lines; an interrupted run resumes where it stopped.
    """
    check_extra("bench")
    from larder_bench.execution.runner import validate_study

    if options.check:
        from larder_bench.cli.check import check_studies

        check_studies(options, task or [])
        return
    study = requested_study(task or [], options)
    cells = validate_study(study)
    runner = _study_run(study, options)
    if options.estimate:
        _print_estimate(runner, len(cells), options)
        return
    is_whole = _run(runner)
    rows = runner.rows()
    if not rows and not is_whole:
        raise KeyboardInterrupt
    if options.json:
        from larder_bench.cli.study_document import study_document

        print_document(study_document(runner, rows))
    else:
        _print_tables(runner, rows)
    if not is_whole:
        have = f"{len(rows)} of {len(cells)} cells"
        print(f"Stopped at {have}: the same command continues from there.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def requested_study(tasks: list[str], options: BenchOptions) -> Study:
    """Study selected by the arguments.

    Raises:
        UsageError: nothing is selected, or both a file and options define it.
    """
    from larder_bench.studies.study import Study, StudyTask, read_study, replace_fields

    overrides = _given_fields(options)
    if options.study is not None:
        if unsupported := [name for name in overrides if name not in OVERRIDABLE_FIELDS.values()]:
            raise UsageError(
                f"--study {options.study} defines what is compared, so "
                f"{_option_name(unsupported[0])} contradicts it: give one of the two."
            )
        written = read_study(options.study)
        return replace_fields(written, overrides | _other_tasks(written, tasks, options.tokens))
    if not tasks:
        raise UsageError(f"Nothing to run: name a task or --study. {_known_names()}")
    lengths = _lengths(options.tokens)
    study_tasks = tuple(StudyTask(task, lengths) for task in tasks)
    values: dict[str, Any] = {"name": "bench", "tasks": study_tasks} | overrides
    return Study(**values)


def _other_tasks(study: Study, tasks: list[str], tokens: str | None) -> dict[str, Any]:
    """Tasks that replace those of a study, or its own tasks at other lengths."""
    from larder_bench.studies.study import StudyTask

    if not tasks and tokens is None:
        return {}
    lengths = _lengths(tokens)
    spellings = tasks or [task.spelling for task in study.tasks]
    return {"tasks": tuple(StudyTask(task, lengths) for task in spellings)}


def _option_name(field: str) -> str:
    """Option that sets a field of a study."""
    options = {of: option for option, of in FIELD_OF_OPTION.items()}
    return "--" + options.get(field, field).replace("_", "-")


def _given_fields(options: BenchOptions) -> dict[str, Any]:
    """Fields of a study that are set by options."""
    fields: dict[str, Any] = {}
    for option in ("name", "first_seed", "matched", *FIELD_OF_OPTION):
        value = getattr(options, option)
        if value is not None:
            fields[FIELD_OF_OPTION.get(option, option)] = (
                tuple(value) if isinstance(value, list) else value
            )
    if fields.get("controls") == (NO_CONTROLS,):
        fields["controls"] = ()
    return fields


def _lengths(text: str | None) -> tuple[int, ...]:
    """Parsed lengths; the default if no text is given."""
    try:
        return DEFAULT_LENGTHS if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--tokens {text!r} is not a list of lengths: write --tokens 1500,4000."
        ) from None


def _known_names() -> str:
    from larder_bench.studies.study import study_names
    from larder_bench.tasks.base import TASKS

    studies = ", ".join(study_names()) or "none here"
    return f"Tasks: {', '.join(TASKS.names())}. Studies: {studies}."


def _study_run(study: Study, options: BenchOptions) -> StudyRunner:
    from torch import get_num_threads

    from larder_bench.execution.runner import StudyRunner

    load_context = context_loader(study, options)
    out = options.out or RESULTS / f"{study.name}.jsonl"
    threads = get_num_threads()
    if not options.ray:
        return StudyRunner(study, out, load_context, threads)
    from larder.core import connect, require_ray
    from larder_bench.execution.ray_executor import ray_execution

    require_ray("'larder bench --ray'")
    connect()
    return StudyRunner(study, out, load_context, threads, ray_execution(load_context, threads))


def _run(runner: StudyRunner) -> bool:
    """Run the study; return False if Ctrl-C came before all cells were measured."""
    from larder.engine.progress_bar import progress_bar

    with progress_bar(f"Running {runner.study.name}", "cells") as update:

        def print_row(row: Row, progress: RunProgress) -> None:
            update(progress.done, progress.total)
            if not sys.stderr.isatty():
                _print_progress(row, progress)

        try:
            runner.run(print_row)
        except KeyboardInterrupt:
            return False
    return True


def _print_progress(row: Row, progress: RunProgress) -> None:
    """Print one line per row, for a log."""
    cell = " ".join(str(row[n]) for n in ("task", "tokens", "seed", "measure", "policy", "budget"))
    outcome = f"refused: {row['refused']}" if "refused" in row else f"{row['seconds']:.1f} s"
    remaining = f"{progress.left_seconds / 60:.0f} min left"
    print(
        f"{progress.done}/{progress.total} {cell}: {outcome}; {remaining}",
        file=sys.stderr,
        flush=True,
    )


def _print_estimate(runner: StudyRunner, cells: int, options: BenchOptions) -> None:
    seconds = runner.estimate(_known_rows(runner))
    total = sum(seconds.values())
    if options.json:
        parts = [
            {"model": model, "task": task, "tokens": int(tokens), "measure": measure}
            | {"policy": policy, "seconds": round(each, 2)}
            for (model, task, tokens, measure, policy), each in seconds.items()
        ]
        print_document(
            {"schema": SCHEMA, "cells": cells, "seconds": round(total, 2), "parts": parts}
        )
        return
    for name, each in seconds.items():
        print(f"{' '.join(name):72} {each / 60:8.1f} min")
    print(f"{f'{cells} cells':72} {total / 60:8.1f} min")


def _known_rows(runner: StudyRunner) -> list[Row]:
    """Measured rows of a study: committed ones, and those of its results file."""
    from larder_bench.reports.study_index import RESULTS as COMMITTED
    from larder_bench.results.rows import read_results, rows_file

    paths = dict.fromkeys((rows_file(COMMITTED, runner.study.name), runner.out))
    return [row for path in paths if path.is_file() for row in read_results([path]).cells]


def _print_tables(runner: StudyRunner, rows: list[Row]) -> None:
    from larder_bench.cli.study_document import comparable_groups
    from larder_bench.reports.paper_comparison import comparison_markdown
    from larder_bench.results.policy_labels import label_legend, policy_labels, relabel_rows
    from larder_bench.results.tables import markdown_report

    names = policy_labels(row["policy"] for row in rows)
    print(
        markdown_report(
            {title: entries for title, _, entries in comparable_groups(relabel_rows(rows, names))}
        )
    )
    if (paper := runner.paper()) is not None:
        print(comparison_markdown(paper, rows, names))
    print("\n".join(label_legend(names)), end="")
    if others := runner.num_other_cells():
        more = "1 cell" if others == 1 else f"{others} cells"
        print(f"{runner.out} holds {more} of other runs: 'larder report {runner.out}' shows all.")
