"""What `larder eval` prints for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from larder.cli.documents import METRICS, differences, expecting, interval_of_means, means
from larder.cli.examining import Examination, Examined
from larder.cli.showing import results, seconds, share, size, table
from larder.cli.sitting import Asked, Sitting
from larder.evaluation.bootstrap import Interval
from larder.session.memory import Coverage, Figures

MISSING = "-"
FILE_COLUMNS = (
    "file",
    "tokens",
    "budget",
    "questions",
    "exact",
    "F1",
    "F1 stemmed",
    "KV",
    "in dense layers",
    "read",
)


def show(examination: Examination) -> None:
    """Print an examination: one file question by question, several file by file."""
    console = results()
    if examination.wanted == 1 and examination.rival is None:
        [only] = examination.files
        assert only.sitting is not None  # without it the examination raised
        _show_file(console, only.sitting)
    else:
        _show_files(console, examination)
    if not examination.is_whole:
        console.print("\ninterrupted: only what was finished is shown.")


def _show_file(console: Console, sitting: Sitting) -> None:
    questions = table("question", "answer", "expected", "exact", "F1", texts=3)
    for one in sitting.asked:
        questions.add_row(one.question.question, *_outcome(one))
    console.print(questions)
    console.print()
    console.print(_kinds(sitting.asked))
    console.print()
    console.print(figures_line(sitting), soft_wrap=True)


def figures_line(sitting: Sitting) -> str:
    """What the answers above were given from, and what it took."""
    figures = sitting.memory.figures
    return (
        f"policy: {sitting.memory.policy}\n"
        f"context {figures.context_tokens:,} tokens, budget {figures.budget_tokens:,} per head; "
        f"read in {seconds(figures.prefill_seconds)}\n"
        f"KV cache {size(figures.active_kv_bytes)} active, {size(figures.kv_bytes)} in all, "
        f"{size(sitting.peak_kv_bytes)} at the peak, {size(figures.full_kv_bytes)} without a budget"
        f"{dense_line(figures)}"
    )


def dense_line(figures: Figures) -> str:
    """A line on the layers that the budget does not cover; empty where there are none."""
    dense = figures.dense
    if not dense:
        return ""
    covered = [each for each in figures.layers if each.coverage is Coverage.BUDGET]
    held = sum(each.active_kv_bytes for each in covered)
    full = sum(each.full_kv_bytes for each in covered)
    return (
        f"\nthe budget does not cover layers {', '.join(str(each.layer) for each in dense)}, which "
        f"are dense: {size(figures.dense_kv_bytes)} of the active cache; the {len(covered)} that "
        f"it covers hold {size(held)} of {size(full)}"
    )


def _outcome(one: Asked) -> tuple[str, str, str, str]:
    expected = one.question.answer or MISSING
    if one.error is not None:
        return f"error: {one.error}", expected, MISSING, MISSING
    text = one.answer.text if one.answer is not None else MISSING
    if one.marks is None:
        return text, expected, MISSING, MISSING
    return text, expected, "yes" if one.marks.exact else "no", share(one.marks.f1)


def _kinds(asked: Sequence[Asked]) -> object:
    """Means by kind of question, and over all."""
    made = table("kind", "questions", "exact", "F1", "F1 stemmed")
    kinds = sorted({one.question.kind for one in asked if one.question.kind})
    for kind in kinds:
        of_kind = [one for one in asked if one.question.kind == kind]
        made.add_row(kind, str(len(of_kind)), *_means(of_kind))
    made.add_row("all", str(len(asked)), *_means(asked), style="bold")
    return made


def _means(asked: Sequence[Asked]) -> list[str]:
    found = means(asked)
    return [share(found[name]) if found else MISSING for name in METRICS]


def _show_files(console: Console, examination: Examination) -> None:
    console.print(f"policy: {examination.engine.policy}\n", soft_wrap=True)
    console.print(_files(examination.files))
    asked = [one.asked for one in examination.files]
    _show_intervals(console, "\nall questions, 95% interval", interval_of_means(asked))
    console.print(_kinds([one for of_file in asked for one in of_file]))
    if examination.rival is not None:
        console.print(f"\nagainst: {examination.rival.policy}\n", soft_wrap=True)
        console.print(_files(examination.others))
        found = differences(examination.pairs())
        _show_intervals(console, "\ndifference in pairs, 95% interval", found)


def _files(files: Sequence[Examined]) -> object:
    made = table(*FILE_COLUMNS)
    for one in files:
        if one.sitting is None:
            made.add_row(f"{one.path}: {one.error}", *[MISSING] * (len(FILE_COLUMNS) - 1))
            continue
        figures = one.sitting.memory.figures
        made.add_row(
            one.path.name,
            f"{figures.context_tokens:,}",
            f"{figures.budget_tokens:,}",
            str(len(expecting(one.asked))),
            *_means(one.asked),
            size(figures.active_kv_bytes),
            size(figures.dense_kv_bytes) if figures.dense else MISSING,
            seconds(figures.prefill_seconds),
        )
    return made


def _show_intervals(console: Console, title: str, found: dict[str, Interval]) -> None:
    console.print(title)
    made = table("score", "mean", "low", "high")
    for name, interval in found.items():
        made.add_row(name, share(interval.mean), share(interval.low), share(interval.high))
    console.print(made)
    console.print()
