"""Evaluation of the questions of many files, under one policy or two that are compared, and the
tables of its results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from larder.cli.console import (
    format_bytes,
    format_score,
    format_seconds,
    make_table,
    results_console,
)
from larder.cli.json_documents import (
    METRICS,
    mean_intervals,
    mean_scores,
    paired_differences,
    scored_questions,
)
from larder.cli.options import ModelOptions
from larder.cli.question_run import (
    QuestionOutcome,
    QuestionRun,
    dense_line,
    open_engine,
    parse_policy_option,
    prefill_run,
    prompts_for,
    sampling_params,
)
from larder.core.conversation import Conversation
from larder.core.errors import InputError, LarderError
from larder.engine.engine import Engine
from larder.engine.progress_bar import progress_bar
from larder.evaluation.bootstrap import Interval
from larder.session.files import Adversarial, find_files, read_conversation

Files = Mapping[Path, Conversation]
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


@dataclass
class FileEvaluation:
    """One file under one policy: its run, or the error that prevented it."""

    path: Path
    run: QuestionRun | None = None
    error: LarderError | None = None

    @property
    def outcomes(self) -> list[QuestionOutcome]:
        """Outcomes so far; empty if the prefill failed."""
        return [] if self.run is None else self.run.outcomes


@dataclass
class Evaluation:
    """Finished files under one policy, and under a second one for comparison.

    Args:
        comparison: engine of the second policy; None without a comparison.
        num_files: number of files given.
        is_whole: False after Ctrl-C.
    """

    engine: Engine
    comparison: Engine | None
    num_files: int
    files: list[FileEvaluation] = field(default_factory=list)
    others: list[FileEvaluation] = field(default_factory=list)
    is_whole: bool = False

    @property
    def scored(self) -> int:
        """Number of files with at least one expected answer."""
        return sum(any(a.question.answer for a in one.outcomes) for one in self.files)

    def pairs(self) -> list[tuple[Sequence[QuestionOutcome], Sequence[QuestionOutcome]]]:
        """Outcomes under both policies, of the questions that both finished."""
        both = zip(self.files, self.others, strict=False)
        counts = [(one, other, min(len(one.outcomes), len(other.outcomes))) for one, other in both]
        return [(one.outcomes[:n], other.outcomes[:n]) for one, other, n in counts]


def load_question_files(paths: Sequence[Path], adversarial: Adversarial) -> Files:
    """Conversations by path, all read before a model loads.

    Raises:
        InputError: a file cannot be read or has no questions.
    """
    found = {path: read_conversation(path, adversarial) for path in find_files(paths)}
    for path, conversation in found.items():
        if not conversation.questions:
            raise InputError(f"{path} has no questions: add some under 'qa', or use larder ask.")
    return found


def evaluate_files(options: ModelOptions, against: str | None, files: Files) -> Evaluation:
    """Answer the questions of all files; Ctrl-C returns what is finished.

    Raises:
        LarderError: the first error, if no question was answered.
        KeyboardInterrupt: before the first file was read.
    """
    engine = open_engine(options, files.values())
    rival = None if against is None else comparison_engine(engine, against)
    evaluation = Evaluation(engine, rival, len(files))
    try:
        for path, conversation in files.items():
            _evaluate_file(options, engine, path, conversation, evaluation.files)
            if rival is not None:
                _evaluate_file(options, rival, path, conversation, evaluation.others)
        evaluation.is_whole = True
    except KeyboardInterrupt:
        if not any(one.run for one in evaluation.files):
            raise
    errors = [e for one in evaluation.files for e in (one.error, *(a.error for a in one.outcomes))]
    answered = any(a.answer for one in evaluation.files for a in one.outcomes)
    if evaluation.is_whole and not answered:
        raise next(error for error in errors if error is not None)
    return evaluation


def comparison_engine(engine: Engine, spelling: str) -> Engine:
    """Engine over the same model with another policy; open sizes are taken from `engine`."""
    policy, sizes = parse_policy_option("--against", spelling), engine.sizes
    is_sized = policy.budget.tokens is not None or policy.budget.kept is not None
    has_block = policy.schedule.has_blocks and policy.schedule.block_tokens is None
    return engine.under(
        policy, None if is_sized else sizes.budget, sizes.block if has_block else None
    )


def _evaluate_file(
    options: ModelOptions,
    engine: Engine,
    path: Path,
    conversation: Conversation,
    evaluations: list[FileEvaluation],
) -> None:
    file_evaluation = FileEvaluation(path)
    evaluations.append(file_evaluation)
    questions = list(conversation.questions)
    try:
        run = prefill_run(engine, conversation, prompts_for(engine, questions))
    except LarderError as error:
        file_evaluation.error = error
        return
    file_evaluation.run = run
    sampling = sampling_params(options)
    with progress_bar(f"Asking about {conversation.name}", "questions") as watch:
        for number, question in enumerate(questions, start=1):
            run.ask(question, sampling, options.max_new_tokens)
            watch(number, len(questions))


def print_evaluation(evaluation: Evaluation) -> None:
    """Print an evaluation: one file by question, several by file."""
    console = results_console()
    if evaluation.num_files == 1 and evaluation.comparison is None:
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
