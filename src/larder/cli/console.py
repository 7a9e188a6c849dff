"""Consoles and tables: results on stdout, notes on a terminal's stderr."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 120  # columns, where stdout is not a terminal


def results_console() -> Console:
    """Console on stdout for results; text is printed verbatim, without markup."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(file=sys.stdout, markup=False, highlight=False, width=width)


def progress_console() -> Console:
    """Console on stderr for progress and notes; silent unless stderr is a terminal."""
    return Console(
        file=sys.stderr, markup=False, highlight=False, quiet=not sys.stderr.isatty(), style="dim"
    )


def make_table(*columns: str, texts: int = 1) -> Table:
    """Empty table: the first `texts` columns hold text and wrap, the others hold numbers."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        if index < texts:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def format_bytes(count: int) -> str:
    """Byte count with a binary unit, such as 1.5 MiB."""
    if count < 1 << 10:
        return f"{count} B"
    amount, unit = count / (1 << 10), "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if amount < 1 << 10:
            break
        amount, unit = amount / (1 << 10), larger
    return f"{amount:.1f} {unit}"


def format_score(value: float) -> str:
    """Score in [0, 1] with three decimals."""
    return f"{value:.3f}"


def format_seconds(value: float) -> str:
    """Duration in seconds with two decimals."""
    return f"{value:.2f} s"
