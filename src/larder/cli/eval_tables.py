"""Tables of `larder eval` for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from larder.cli.console import (
    format_bytes,
    format_score,
    format_seconds,
    make_table,
    results_console,
)
from larder.cli.evaluation import Evaluation, FileEvaluation
from larder.cli.json_documents import (
    METRICS,
    mean_intervals,
    mean_scores,
    paired_differences,
    scored_questions,
)
from larder.cli.question_run import QuestionOutcome, QuestionRun, dense_line
from larder.evaluation.bootstrap import Interval

MISSING = "-"
FILE_COLUMNS = (
    "file",
    "tokens",
    "budget",
    "questions",
    "exact",
    "contains",
    "F1",
    "F1 stemmed",
    "KV",
    "in dense layers",
    "read",
)


def print_evaluation(evaluation: Evaluation) -> None:
    """Print an evaluation: one file by question, several by file."""
    console = results_console()
    if evaluation.wanted == 1 and evaluation.comparison is None:
        [only] = evaluation.files
        assert only.run is not None  # evaluate_files raises otherwise
        _print_file(console, only.run)
    else:
        _print_files(console, evaluation)
    if not evaluation.is_whole:
        console.print("\ninterrupted: only finished questions are shown.")


def _print_file(console: Console, run: QuestionRun) -> None:
    questions = make_table("question", "answer", "expected", "exact", "contains", "F1", texts=3)
    for one in run.outcomes:
        questions.add_row(one.question.question, *_outcome_cells(one))
    console.print(questions)
    console.print()
    console.print(_kinds_table(run.outcomes))
    console.print()
    console.print(figures_line(run), soft_wrap=True)


def figures_line(run: QuestionRun) -> str:
    """Policy, context, budget, prefill time and cache sizes of a run."""
    figures = run.memory.figures
    return (
        f"policy: {run.memory.policy}\n"
        f"context {figures.context_tokens:,} tokens, budget {figures.budget_tokens:,} per head; "
        f"read in {format_seconds(figures.prefill_seconds)}\n"
        f"KV cache {format_bytes(figures.active_kv_bytes)} active, "
        f"{format_bytes(figures.kv_bytes)} in all, "
        f"{format_bytes(run.peak_kv_bytes)} at the peak, "
        f"{format_bytes(figures.full_kv_bytes)} without a budget"
        f"{dense_line(figures)}"
    )


def _outcome_cells(one: QuestionOutcome) -> tuple[str, ...]:
    expected = one.question.answer or MISSING
    if one.error is not None:
        return f"error: {one.error}", expected, MISSING, MISSING, MISSING
    text = one.answer.text if one.answer is not None else MISSING
    if one.scores is None:
        return text, expected, MISSING, MISSING, MISSING
    exact, contains = (
        "yes" if found else "no" for found in (one.scores.exact, one.scores.contains)
    )
    return text, expected, exact, contains, format_score(one.scores.f1)


def _kinds_table(outcomes: Sequence[QuestionOutcome]) -> object:
    """Table of mean scores by kind of question, and over all."""
    table = make_table("kind", "questions", "exact", "contains", "F1", "F1 stemmed")
    kinds = sorted({one.question.kind for one in outcomes if one.question.kind})
    for kind in kinds:
        of_kind = [one for one in outcomes if one.question.kind == kind]
        table.add_row(kind, str(len(of_kind)), *_mean_cells(of_kind))
    table.add_row("all", str(len(outcomes)), *_mean_cells(outcomes), style="bold")
    return table


def _mean_cells(outcomes: Sequence[QuestionOutcome]) -> list[str]:
    found = mean_scores(outcomes)
    return [format_score(found[name]) if name in found else MISSING for name in METRICS]


def _print_files(console: Console, evaluation: Evaluation) -> None:
    console.print(f"policy: {evaluation.engine.policy}\n", soft_wrap=True)
    console.print(_files_table(evaluation.files))
    outcomes = [one.outcomes for one in evaluation.files]
    _print_intervals(console, "\nall questions, 95% interval", mean_intervals(outcomes))
    console.print(_kinds_table([one for of_file in outcomes for one in of_file]))
    if evaluation.comparison is not None:
        console.print(f"\nagainst: {evaluation.comparison.policy}\n", soft_wrap=True)
        console.print(_files_table(evaluation.others))
        found = paired_differences(evaluation.pairs())
        _print_intervals(console, "\ndifference in pairs, 95% interval", found)


def _files_table(files: Sequence[FileEvaluation]) -> object:
    table = make_table(*FILE_COLUMNS)
    for one in files:
        if one.run is None:
            table.add_row(f"{one.path}: {one.error}", *[MISSING] * (len(FILE_COLUMNS) - 1))
            continue
        figures = one.run.memory.figures
        table.add_row(
            one.path.name,
            f"{figures.context_tokens:,}",
            f"{figures.budget_tokens:,}",
            str(len(scored_questions(one.outcomes))),
            *_mean_cells(one.outcomes),
            format_bytes(figures.active_kv_bytes),
            format_bytes(figures.dense_kv_bytes) if figures.dense else MISSING,
            format_seconds(figures.prefill_seconds),
        )
    return table


def _print_intervals(console: Console, title: str, intervals: dict[str, Interval]) -> None:
    console.print(title)
    table = make_table("score", "mean", "low", "high")
    for name, interval in intervals.items():
        table.add_row(
            name,
            format_score(interval.mean),
            format_score(interval.low),
            format_score(interval.high),
        )
    console.print(table)
    console.print()
