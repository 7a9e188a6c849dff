"""From result files to drawings: which policies, how each looks, which figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from larder.bench.rows import Results, results
from larder.core.errors import InputError, UnknownName, UsageError
from larder.core.family import unknown
from larder.core.spelling import build, parse
from larder.plots.figures.base import FIGURES, Figure, Looks, NothingToDraw
from larder.plots.looks import FULL, looks
from larder.plots.style import Drawing

# They get the first colors, in this order, and so one each among any number of policies.
CORE = ("epicache", "d2o", "icecache")


def read(paths: Sequence[Path], policies: Sequence[str] = ()) -> tuple[Results, Looks]:
    """What result files hold of some policies, and how each is drawn.

    Args:
        policies: names, in the order wanted; unless given all, the three systems at the core first.
            The full cache stays as what the others are compared with.

    Raises:
        InputError: a file cannot be read, or nothing was measured.
        UnknownName: no row is of a policy that was named.
    """
    found = results(paths)
    if not found.cells and not found.exhibits:
        raise InputError("The result files hold nothing measured: run larder bench first.")
    known = dict.fromkeys(row["policy"] for row in (*found.cells, *found.exhibits))
    for policy in policies:
        if policy not in known:
            raise UnknownName(unknown("policy in the result files", policy, list(known)))
    core = [policy for policy in CORE if policy in known]
    wanted = dict.fromkeys(policies or [*core, *known])
    if FULL in known:
        wanted[FULL] = None
    kept = replace(
        found,
        cells=tuple(row for row in found.cells if row["policy"] in wanted),
        exhibits=tuple(row for row in found.exhibits if row["policy"] in wanted),
    )
    return kept, looks(wanted)


def figure_of(spelling: str) -> Figure:
    """A figure as it is written: `quality`, or `quality(score="f1")`.

    Raises:
        UsageError: it is not one figure.
        UnknownName: there is no such figure, or it has no such parameter.
        BadParameter: a value out of range.
    """
    calls = parse(spelling, "figure")
    if len(calls) != 1:
        raise UsageError(f"--figure takes one figure, got {spelling!r}: give the option twice.")
    return build(FIGURES.load(calls[0].name), calls[0].parameters)


def draw(figures: Sequence[Figure], found: Results, seen: Looks) -> list[Drawing]:
    """All drawings of the figures that were asked for.

    Raises:
        NothingToDraw: the results do not suffice for one of them.
    """
    return [drawing for figure in figures for drawing in figure.draw(found, seen)]


def draw_all(found: Results, seen: Looks) -> list[Drawing]:
    """Every figure that the results suffice for, as it is without parameters."""
    drawings: list[Drawing] = []
    for name in ORDER:
        try:
            drawings += FIGURES.load(name)().draw(found, seen)
        except NothingToDraw:
            continue
    return drawings


ORDER = (
    "quality",
    "grid",
    "memory",
    "latency",
    "budgets",
    "similarity",
    "prompt_curve",
    "clusters",
    "recall",
    "eviction",
)
