"""What the comparisons of presets are told on the command line, and how they run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from _cases import cases
from _cells import SMALLER, Cell, all_cells, key

import larder.cli
from larder.bench.cases import Case
from larder.bench.rows import Row
from larder.bench.running import Pace, Run, estimate
from larder.bench.surroundings import commit_of_this

DEMO = Path(larder.cli.__path__[0]) / "demo"


def parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """Options that all comparisons have; results go to `results/NAME.jsonl` by default."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--model", default="seed")
    options.add_argument("--policies", default="", help="names of cases; all unless given")
    options.add_argument("--shares", default=",".join(SMALLER))
    options.add_argument("--out", type=Path, default=Path(f"results/{name}.jsonl"))
    options.add_argument("--code", default=commit_of_this(), help="label of the code that is run")
    options.add_argument("--estimate", action="store_true", help="only say how long it takes")
    options.add_argument("--report", action="store_true", help="only print the tables")
    return options


def named(options: argparse.Namespace) -> list[Case]:
    """The cases that were asked for."""
    return cases([name for name in options.policies.split(",") if name])


def latest(rows: Sequence[Row]) -> list[Row]:
    """The last line of each file, policy and share."""
    return list({(row["file"], row["policy"], row["share"]): row for row in rows}.values())


def run(
    options: argparse.Namespace,
    files: Sequence[Path],
    chosen: Sequence[Case],
    measure: Callable[[Cell], Row],
) -> None:
    """Measure every cell, or say how long that takes."""
    cells = list(all_cells(files, chosen, options.shares.split(",")))
    if options.estimate:
        _print_estimate(estimate(cells, lambda cell: cell.case.name, measure), cells)
        return
    common = {"commit": commit_of_this()}
    made = Run(cells, lambda cell: cell.head(options.code), key, measure, options.out, common)
    print(f"{len(cells)} cells, {len(made.left())} to measure", file=sys.stderr)
    made.go(_tell)


def _tell(row: Row, pace: Pace) -> None:
    each = pace.seconds / pace.done
    rest = f"{pace.left_seconds / 60:.0f} min left at {each:.2f} s a cell"
    print(row["file"], row["policy"], row["share"], rest, file=sys.stderr, flush=True)


def _print_estimate(seconds: dict[str, float], cells: Sequence[Cell]) -> None:
    """A line per case, and the whole."""
    for name, total in seconds.items():
        count = sum(cell.case.name == name for cell in cells)
        print(f"{name:24}{total / count:8.2f} s a cell {total / 60:8.1f} min")
    print(f"{'all':24}{len(cells):8} cells  {sum(seconds.values()) / 60:8.1f} min")
