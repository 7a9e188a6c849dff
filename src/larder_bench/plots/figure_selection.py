"""From result files to drawings: which policies, how each looks, which figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from larder.core.errors import InputError, UnknownName, UsageError
from larder.core.family import unknown_name_message
from larder.core.spelling import build, parse
from larder_bench.plots.figures.base import FIGURES, Figure, NothingToDraw, PolicyStyles
from larder_bench.plots.policy_styles import FULL, assign_styles
from larder_bench.plots.style import Drawing
from larder_bench.results.policy_labels import policy_labels
from larder_bench.results.rows import Results, Row, read_results

# They get the first colors, in this order, and so one each among any number of policies.
MAIN_POLICIES = ("epicache", "d2o", "icecache")
REQUIRED_BYTES = ("context_tokens", "full_kv_bytes", "kv_bytes", "active_kv_bytes", "peak_kv_bytes")
PolicyLabels = Mapping[tuple[str, str], str]  # by study and policy


def load_results(
    paths: Sequence[Path], policies: Sequence[str] = ()
) -> tuple[Results, PolicyStyles]:
    """Results of selected policies by short names, with the style of each.

    As `select_policies`.
    """
    found, names = select_policies(paths, policies)
    return relabel_results(found, names), assign_styles(names.values())


def select_policies(
    paths: Sequence[Path], policies: Sequence[str] = ()
) -> tuple[Results, PolicyLabels]:
    """Results of selected policies, with the short name of each in each study.

    Args:
        policies: names, long or short, in the order wanted; unless given all, the three systems at
            the core first. The full cache stays as what the others are compared with.

    Raises:
        InputError: a file cannot be read, or nothing was measured, or a cell takes no bytes.
        UnknownName: no row is of a policy that was named.
    """
    found = read_results(paths)
    rows = (*found.cells, *found.exhibits)
    if not rows:
        raise InputError("The result files hold nothing measured: run larder bench first.")
    for row in found.measured:
        _check(row)
    names = _names(rows)
    for policy in policies:
        if not any(policy in (name, short) for (_, name), short in names.items()):
            known = list(dict.fromkeys(names.values()))
            raise UnknownName(unknown_name_message("policy in the result files", policy, known))
    ranks = {place: _rank(place[1], short, policies) for place, short in names.items()}
    wanted = sorted((place for place in names if ranks[place] >= 0), key=ranks.__getitem__)
    kept = replace(
        found,
        cells=tuple(row for row in found.cells if _place(row) in wanted),
        exhibits=tuple(row for row in found.exhibits if _place(row) in wanted),
    )
    return kept, {place: names[place] for place in wanted}


def relabel_results(found: Results, names: PolicyLabels) -> Results:
    """Results with policies renamed to their labels in tables and figures."""

    def again(rows: Sequence[Row]) -> tuple[Row, ...]:
        return tuple(row | {"policy": names[_place(row)]} for row in rows)

    return replace(found, cells=again(found.cells), exhibits=again(found.exhibits))


def _names(rows: Sequence[Row]) -> PolicyLabels:
    studies: dict[str, list[str]] = {}
    for row in rows:
        studies.setdefault(row["study"], []).append(row["policy"])
    return {
        (study, name): short
        for study, own in studies.items()
        for name, short in policy_labels(own).items()
    }


def _rank(name: str, short: str, policies: Sequence[str]) -> int:
    """Index of a policy in the order; -1 if it is not selected."""
    if not policies:
        return MAIN_POLICIES.index(name) if name in MAIN_POLICIES else len(MAIN_POLICIES)
    places = [place for place, one in enumerate(policies) if one in (name, short)]
    return places[0] if places else len(policies) if name == FULL else -1


def _place(row: Row) -> tuple[str, str]:
    return row["study"], row["policy"]


def _check(row: Row) -> None:
    """Raises: InputError: figures cannot be drawn of such a cell."""
    for name in REQUIRED_BYTES:
        if not (row.get(name) or 0) > 0:
            raise InputError(
                f"A cell of {row['policy']} on {row['task']} must have {name} above 0, got "
                f"{row.get(name)!r}: measure it again, or name files that larder bench has written."
            )


def parse_figure(spelling: str) -> Figure:
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


def draw_figures(figures: Sequence[Figure], found: Results, seen: PolicyStyles) -> list[Drawing]:
    """All drawings of the figures that were asked for.

    Raises:
        NothingToDraw: the results do not suffice for one of them.
    """
    return [drawing for figure in figures for drawing in figure.draw(found, seen)]


def draw_all(found: Results, seen: PolicyStyles) -> list[Drawing]:
    """Every figure that the results suffice for, as it is without parameters."""
    drawings: list[Drawing] = []
    for name in FIGURE_ORDER:
        try:
            drawings += FIGURES.load(name)().draw(found, seen)
        except NothingToDraw:
            continue
    return drawings


FIGURE_ORDER = (
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
