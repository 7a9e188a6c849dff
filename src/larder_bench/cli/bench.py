"""`larder bench`: run a study, said on the command line or described by a file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larder.cli.errors import INTERRUPTED_EXIT_CODE, SCHEMA, print_document
from larder.cli.options import OutputOptions, command
from larder.core.errors import UsageError

if TYPE_CHECKING:
    from larder_bench.execution.resumable_run import RunProgress
    from larder_bench.execution.runner import StudyRunner
    from larder_bench.results.rows import Row
    from larder_bench.studies.model_context import ModelContext
    from larder_bench.studies.study import Study

Names = list[str]
RESULTS = Path("results")
NO_CONTROLS = "none"
DEFAULT_LENGTHS = (1500,)  # tokens
# What a study's file says, and the options that may say otherwise.
OVERRIDABLE_FIELDS = {
    "model": "models",
    "files": "files",
    "budget": "budgets",
    "measure": "measure",
}
FIELD_OF_OPTION = {"policy": "policies", "control": "controls", **OVERRIDABLE_FIELDS}


@dataclass(frozen=True)
class BenchOptions(OutputOptions):
    """Overrides of a study on the command line; None keeps the study's value."""

    study: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help="A study in TOML, or one of studies/.")
    ] = None
    tokens: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Lengths.  Default: 1500.")
    ] = None
    files: Annotated[
        int | None, typer.Option(help="Conversations per task and length.  Default: 9.")
    ] = None
    first_seed: Annotated[int | None, typer.Option(help="Of the first of them.")] = None
    policy: Annotated[
        Names | None, typer.Option(metavar="SPELLING", help="May be given many times.")
    ] = None
    control: Annotated[
        Names | None,
        typer.Option(
            metavar="NAME",
            help="full, random, oracle, exact_topk, rag_2k, rag_episodic; none.  Default: all six.",
        ),
    ] = None
    budget: Annotated[
        Names | None,
        typer.Option(metavar="SIZE", help="1/4, 12.5%, 512 (tokens per kv head), 64MiB."),
    ] = None
    matched: Annotated[
        Names | None,
        typer.Option(
            metavar="WHAT",
            help="Held equal: bytes, tokens, or total (of all caches).  Default: bytes and tokens, "
            "each by itself.",
        ),
    ] = None
    measure: Annotated[
        Names | None,
        typer.Option(
            metavar="SPELLING",
            help="forced, generated, answer_kl, fidelity, similarity, prompts, recall, decode, "
            "reading, stages.",
        ),
    ] = None
    name: Annotated[str | None, typer.Option(help="Of the study.  Default: bench.")] = None
    model: Annotated[
        Names | None,
        typer.Option(metavar="NAME_OR_PATH", help="Also random:qwen3-0.6b.  Default: seed."),
    ] = None
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps.")] = (
        "cpu"
    )
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.  Default: float32 on a CPU.")
    ] = None
    corpus: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Prose and dialogues to make tasks of.")
    ] = None
    data: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A folder per public data set.")
    ] = None
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: results/STUDY.jsonl.")
    ] = None
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Measure on all machines of a Ray cluster; each takes as many threads."
        ),
    ] = False
    estimate: Annotated[bool, typer.Option("--estimate", help="Only say how long it takes.")] = (
        False
    )


@command
def bench(
    options: BenchOptions,
    task: Annotated[
        list[str] | None,
        typer.Argument(metavar="TASK...", help="Such as needles, or \"needles(kind='kv')\"."),
    ] = None,
) -> None:
    """Measure policies on TASK at equal bytes and equal tokens, or run a whole study.

    Rows go to a file of JSON lines; a run that was stopped goes on where it was.
    """
    from larder_bench.execution.runner import validate_study

    study = requested_study(task or [], options)
    cells = validate_study(study)
    running = _study_run(study, options)
    if options.estimate:
        _print_estimate(running, len(cells), options)
        return
    is_whole = _run(running)
    rows = running.rows()
    if not rows and not is_whole:
        raise KeyboardInterrupt
    if options.json:
        from larder_bench.cli.study_document import study_document

        print_document(study_document(running, rows))
    else:
        _print_tables(running, rows)
    if not is_whole:
        have = f"{len(rows)} of {len(cells)} cells"
        print(f"Stopped at {have}: the same command goes on from there.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def requested_study(tasks: list[str], options: BenchOptions) -> Study:
    """The study that is asked for.

    Raises:
        UsageError: none is, or both a file and words say what it is.
    """
    from larder_bench.studies.study import Study, StudyTask, read_study, replace_fields

    said = _given_fields(options)
    if options.study is not None:
        if wrong := [name for name in said if name not in OVERRIDABLE_FIELDS.values()]:
            raise UsageError(
                f"--study {options.study} says what is compared, so {_option_name(wrong[0])} "
                "contradicts it: give one of the two."
            )
        written = read_study(options.study)
        return replace_fields(written, said | _other_tasks(written, tasks, options.tokens))
    if not tasks:
        raise UsageError(f"Nothing to run: name a task or --study. {_known_names()}")
    lengths = _lengths(options.tokens)
    wanted = tuple(StudyTask(task, lengths) for task in tasks)
    values: dict[str, Any] = {"name": "bench", "tasks": wanted} | said
    return Study(**values)


def _other_tasks(study: Study, tasks: list[str], tokens: str | None) -> dict[str, Any]:
    """Tasks that replace a study's, or its own at other lengths."""
    from larder_bench.studies.study import StudyTask

    if not tasks and tokens is None:
        return {}
    lengths = _lengths(tokens)
    own = tasks or [task.spelling for task in study.tasks]
    return {"tasks": tuple(StudyTask(task, lengths) for task in own)}


def _option_name(field: str) -> str:
    """The option that says a field of a study."""
    options = {of: option for option, of in FIELD_OF_OPTION.items()}
    return "--" + options.get(field, field).replace("_", "-")


def _given_fields(options: BenchOptions) -> dict[str, Any]:
    """The fields of a study that options give."""
    told: dict[str, Any] = {}
    for option in ("name", "first_seed", "matched", *FIELD_OF_OPTION):
        value = getattr(options, option)
        if value is not None:
            told[FIELD_OF_OPTION.get(option, option)] = (
                tuple(value) if isinstance(value, list) else value
            )
    if told.get("controls") == (NO_CONTROLS,):
        told["controls"] = ()
    return told


def _lengths(text: str | None) -> tuple[int, ...]:
    """Lengths, or the usual one where nothing is said."""
    try:
        return DEFAULT_LENGTHS if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--tokens {text!r} is no list of lengths: write --tokens 1500,4000."
        ) from None


def _known_names() -> str:
    from larder_bench.studies.study import study_names
    from larder_bench.tasks.base import TASKS

    studies = ", ".join(study_names()) or "none here"
    return f"Tasks: {', '.join(TASKS.names())}. Studies: {studies}."


def _study_run(study: Study, options: BenchOptions) -> StudyRunner:
    from torch import get_num_threads

    from larder.cli.console import progress_bar
    from larder.engine.engine import Engine
    from larder_bench.datasets.sources import TaskSources
    from larder_bench.execution.runner import StudyRunner
    from larder_bench.studies.model_context import ModelContext

    def opened(model: str) -> ModelContext:
        from larder_bench.random_models import open_model

        with progress_bar(f"Loading {model}"):
            engine = Engine(open_model(model, options.device, options.dtype), "full")
        return ModelContext(
            engine, TaskSources(engine.tokenizer.count_tokens, options.corpus, options.data)
        )

    out = options.out or RESULTS / f"{study.name}.jsonl"
    threads = get_num_threads()
    if not options.ray:
        return StudyRunner(study, out, opened, threads)
    from larder.core.ray_cluster import connect, require_ray
    from larder_bench.execution.ray_executor import ray_execution

    require_ray("'larder bench --ray'")
    connect()
    return StudyRunner(study, out, opened, threads, ray_execution(opened, threads))


def _run(running: StudyRunner) -> bool:
    """False if Ctrl-C came before all cells were measured."""
    from larder.cli.console import progress_bar

    with progress_bar(f"Running {running.study.name}", "cells") as watch:

        def tell(row: Row, pace: RunProgress) -> None:
            watch(pace.done, pace.total)
            if not sys.stderr.isatty():
                _print_progress(row, pace)

        try:
            running.go(tell)
        except KeyboardInterrupt:
            return False
    return True


def _print_progress(row: Row, pace: RunProgress) -> None:
    """A line for who reads a log."""
    what = " ".join(str(row[n]) for n in ("task", "tokens", "seed", "measure", "policy", "budget"))
    came = f"refused: {row['refused']}" if "refused" in row else f"{row['seconds']:.1f} s"
    left = f"{pace.left_seconds / 60:.0f} min left"
    print(f"{pace.done}/{pace.total} {what}: {came}; {left}", file=sys.stderr, flush=True)


def _print_estimate(running: StudyRunner, cells: int, options: BenchOptions) -> None:
    seconds = running.estimate()
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


def _print_tables(running: StudyRunner, rows: list[Row]) -> None:
    from larder_bench.cli.study_document import comparable_groups
    from larder_bench.reports.paper_comparison import comparison_markdown
    from larder_bench.results.policy_labels import label_legend, policy_labels, relabel_rows
    from larder_bench.results.tables import markdown_report

    names = policy_labels(row["policy"] for row in rows)
    print(
        markdown_report(
            {title: own for title, _, own in comparable_groups(relabel_rows(rows, names))}
        )
    )
    if (paper := running.paper()) is not None:
        print(comparison_markdown(paper, rows, names))
    print("\n".join(label_legend(names)), end="")
    if others := running.others():
        more = "1 cell" if others == 1 else f"{others} cells"
        print(f"{running.out} holds {more} of other runs: 'larder report {running.out}' shows all.")
