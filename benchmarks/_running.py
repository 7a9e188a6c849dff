"""What the comparisons of presets are told on the command line, and how they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from _cases import Case, cases
from _cells import (
    SMALLER,
    Cell,
    Row,
    all_cells,
    commit_of_this,
    estimate,
    measure_all,
    print_estimate,
)

import larder.cli

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


def run(
    options: argparse.Namespace,
    files: Sequence[Path],
    chosen: Sequence[Case],
    measure: Callable[[Cell], Row],
) -> None:
    """Measure every cell, or say how long that takes."""
    cells = list(all_cells(files, chosen, options.shares.split(",")))
    if options.estimate:
        print_estimate(estimate(cells, measure), cells)
    else:
        measure_all(cells, measure, options.out, options.code)
