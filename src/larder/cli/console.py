"""Where a command writes: results to stdout, and to a terminal's stderr how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PIPED_WIDTH = 120  # columns of a table where no terminal says how wide it is

ProgressCallback = Callable[[int, int], None]


def results_console() -> Console:
    """For results. Text of ours and of others is printed as it is, never taken for markup."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(file=sys.stdout, markup=False, highlight=False, width=width)


def progress_console() -> Console:
    """For what is no result; seen on a terminal alone."""
    return Console(
        file=sys.stderr, markup=False, highlight=False, quiet=not sys.stderr.isatty(), style="dim"
    )


@contextmanager
def progress_bar(doing: str, unit: str = "") -> Iterator[ProgressCallback]:
    """A bar on stderr while something takes its time; gone afterwards, and absent when piped.

    Args:
        doing: what takes time.
        unit: of what `watch(done, total)` is told. Until it is told, the bar only moves.
    """
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
        console=progress_console(),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(doing, total=None, count="")

        def watch(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, count=f"{done:,}/{total:,} {unit}")

        yield watch


def make_table(*columns: str, texts: int = 1) -> Table:
    """An empty table whose first columns hold text and whose others hold figures."""
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        if number < texts:
            made.add_column(column, overflow="fold")
        else:
            made.add_column(column, justify="right", no_wrap=True)
    return made


def format_bytes(count: int) -> str:
    """Bytes as people read them."""
    if count < 1 << 10:
        return f"{count} B"
    amount, unit = count / (1 << 10), "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if amount < 1 << 10:
            break
        amount, unit = amount / (1 << 10), larger
    return f"{amount:.1f} {unit}"


def format_score(value: float) -> str:
    """A score in [0, 1]."""
    return f"{value:.3f}"


def format_seconds(value: float) -> str:
    """A duration."""
    return f"{value:.2f} s"
