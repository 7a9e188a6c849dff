"""From result files to drawings: which policies, how each looks, which figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from larder.bench.naming import short_names
from larder.bench.rows import Results, Row, results
from larder.core.errors import InputError, UnknownName, UsageError
from larder.core.family import unknown
from larder.core.spelling import build, parse
from larder.plots.figures.base import FIGURES, Figure, Looks, NothingToDraw
from larder.plots.looks import FULL, looks
from larder.plots.style import Drawing

# They get the first colors, in this order, and so one each among any number of policies.
CORE = ("epicache", "d2o", "icecache")


def read(paths: Sequence[Path], policies: Sequence[str] = ()) -> tuple[Results, Looks]:
    """What result files hold of some policies, by short names, and how each is drawn.

    As `chosen`.
    """
    found, names = chosen(paths, policies)
    return renamed(found, names), looks(names.values())


def renamed(found: Results, names: Mapping[str, str]) -> Results:
    """The same with policies by the names that tables and figures give them."""

    def again(rows: Sequence[Row]) -> tuple[Row, ...]:
        return tuple(row | {"policy": names[row["policy"]]} for row in rows)

    return replace(found, cells=again(found.cells), exhibits=again(found.exhibits))


def chosen(paths: Sequence[Path], policies: Sequence[str] = ()) -> tuple[Results, dict[str, str]]:
    """What result files hold of some policies, and the short name of each, in their order.

    Args:
        policies: names, long or short, in the order wanted; unless given all, the three systems at
            the core first. The full cache stays as what the others are compared with.

    Raises:
        InputError: a file cannot be read, or nothing was measured.
        UnknownName: no row is of a policy that was named.
    """
    found = results(paths)
    if not found.cells and not found.exhibits:
        raise InputError("The result files hold nothing measured: run larder bench first.")
    known = short_names(row["policy"] for row in (*found.cells, *found.exhibits))
    by_short = {short: name for name, short in known.items()}
    for policy in policies:
        if policy not in known and policy not in by_short:
            raise UnknownName(unknown("policy in the result files", policy, list(by_short)))
    core = [policy for policy in CORE if policy in known]
    asked = [policy if policy in known else by_short[policy] for policy in policies]
    wanted = dict.fromkeys(asked or [*core, *known])
    if FULL in known:
        wanted[FULL] = None
    kept = replace(
        found,
        cells=tuple(row for row in found.cells if row["policy"] in wanted),
        exhibits=tuple(row for row in found.exhibits if row["policy"] in wanted),
    )
    return kept, {name: known[name] for name in wanted}


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
