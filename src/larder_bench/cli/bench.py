"""`larder bench`: run a study given by command line options or by a file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larder.cli.errors import INTERRUPTED_EXIT_CODE, SCHEMA, print_document
from larder.cli.options import OutputOptions, command
from larder.core import UsageError

if TYPE_CHECKING:
    from larder_bench.execution.resumable_run import RunProgress
    from larder_bench.execution.runner import ContextLoader, StudyRunner
    from larder_bench.results.rows import Row
    from larder_bench.studies.model_context import ModelContext
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


@dataclass(frozen=True)
class BenchOptions(OutputOptions):
    """Overrides of a study on the command line; None keeps the study's value."""

    study: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help="Study in TOML, or one of studies/.")
    ] = None
    tokens: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Lengths.  Default: 1500.")
    ] = None
    files: Annotated[
        int | None, typer.Option(help="Conversations per task and length.  Default: 9.")
    ] = None
    first_seed: Annotated[int | None, typer.Option(help="Seed of the first conversation.")] = None
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
            help="Quantity held equal: bytes, tokens, or total (of all caches).  Default: bytes "
            "and tokens, separately.",
        ),
    ] = None
    question: Annotated[
        Names | None,
        typer.Option(
            metavar="after|inside",
            help="Place of the question: after the compressed context, or inside it, read and "
            "compressed with it.  Default: after.",
        ),
    ] = None
    wording: Annotated[
        str | None,
        typer.Option(
            metavar="seed|instruct|plain", help="Of the prompts.  Default: what the model follows."
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
    name: Annotated[str | None, typer.Option(help="Name of the study.  Default: bench.")] = None
    model: Annotated[
        Names | None,
        typer.Option(metavar="NAME_OR_PATH", help="Also random:qwen3-0.6b.  Default: seed."),
    ] = None
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps.")] = (
        "cpu"
    )
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16.  Default: that of the weights where the CPU is "
            "fast at it, else float32."
        ),
    ] = None
    corpus: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Prose and dialogues to build tasks from.")
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder with one folder per public data set."),
    ] = None
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: results/STUDY.jsonl.")
    ] = None
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Measure on all machines of a Ray cluster; workers use as many threads."
        ),
    ] = False
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Only print the estimated duration.")
    ] = False
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Measure the cheapest committed cell of the study, or of --policy, again and "
            "compare; without --study one of each study on a packaged model.",
        ),
    ] = False


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
        print(f"Stopped at {have}: the same command goes on from there.", file=sys.stderr)
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


def context_loader(study: Study, options: BenchOptions) -> ContextLoader:
    """Loader of a study's models, worded as the study asks."""
    from larder.engine import Engine
    from larder.engine.progress_bar import progress_bar
    from larder_bench.datasets.sources import TaskSources
    from larder_bench.datasets.wording import Wording
    from larder_bench.studies.model_context import ModelContext

    def load_context(model: str) -> ModelContext:
        from larder_bench.random_models import open_model

        with progress_bar(f"Loading {model}"):
            engine = Engine(open_model(model, options.device, options.dtype), policy="full")
        template = engine.tokenizer.tokenizer.chat_template
        wording = (
            Wording(study.wording) if study.wording else Wording.of_model(model, bool(template))
        )
        count = engine.tokenizer.count_tokens
        return ModelContext(engine, TaskSources(count, options.corpus, options.data, wording))

    return load_context


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
    seconds = runner.estimate()
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
