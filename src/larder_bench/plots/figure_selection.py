"""Selection of policies and figures for drawings of results files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from larder.core import InputError, UnknownName, UsageError, build, parse, unknown_name_message
from larder_bench.plots.figures.base import FIGURES, Figure, NothingToDraw, PolicyStyles
from larder_bench.plots.policy_styles import FULL, assign_styles
from larder_bench.plots.style import Drawing
from larder_bench.results.policy_labels import policy_labels
from larder_bench.results.rows import Results, Row, read_results

# These get the first colors, in this order, so that each has one among any number of policies.
MAIN_POLICIES = ("epicache", "d2o", "icecache")
REQUIRED_BYTES = ("context_tokens", "full_kv_bytes", "kv_bytes", "active_kv_bytes", "peak_kv_bytes")
PolicyLabels = Mapping[tuple[str, str], str]  # by study and policy


def load_results(
    paths: Sequence[Path], policies: Sequence[str] = ()
) -> tuple[Results, PolicyStyles]:
    """Results of selected policies by label, with the style of each.

    See `select_policies`.
    """
    selected, names = select_policies(paths, policies)
    return relabel_results(selected, names), assign_styles(names.values())


def select_policies(
    paths: Sequence[Path], policies: Sequence[str] = ()
) -> tuple[Results, PolicyLabels]:
    """Results of selected policies, with the label of each in each study.

    Args:
        policies: names or labels in drawing order; by default all, the three main systems first.
            The full cache is always kept for comparison.

    Raises:
        InputError: a file cannot be read, nothing was measured, or a cell has no bytes.
        UnknownName: a policy has no row.
    """
    results = read_results(paths)
    rows = (*results.cells, *results.exhibits)
    if not rows:
        raise InputError("The results files hold no measurements: run larder bench first.")
    for row in results.measured:
        _check(row)
    names = _names(rows)
    for policy in policies:
        if not any(policy in (name, short) for (_, name), short in names.items()):
            known = list(dict.fromkeys(names.values()))
            raise UnknownName(unknown_name_message("policy in the results files", policy, known))
    ranks = {place: _rank(place[1], short, policies) for place, short in names.items()}
    selected = sorted((place for place in names if ranks[place] >= 0), key=ranks.__getitem__)
    kept = replace(
        results,
        cells=tuple(row for row in results.cells if _place(row) in selected),
        exhibits=tuple(row for row in results.exhibits if _place(row) in selected),
    )
    return kept, {place: names[place] for place in selected}


def relabel_results(results: Results, names: PolicyLabels) -> Results:
    """Results with policies renamed to their labels in tables and figures."""

    def relabel(rows: Sequence[Row]) -> tuple[Row, ...]:
        return tuple(row | {"policy": names[_place(row)]} for row in rows)

    return replace(results, cells=relabel(results.cells), exhibits=relabel(results.exhibits))


def _names(rows: Sequence[Row]) -> PolicyLabels:
    studies: dict[str, list[str]] = {}
    for row in rows:
        studies.setdefault(row["study"], []).append(row["policy"])
    return {
        (study, name): short
        for study, policies in studies.items()
        for name, short in policy_labels(policies).items()
    }


def _rank(name: str, short: str, policies: Sequence[str]) -> int:
    """Rank of a policy in the order; -1 if it is not selected."""
    if not policies:
        return MAIN_POLICIES.index(name) if name in MAIN_POLICIES else len(MAIN_POLICIES)
    places = [place for place, one in enumerate(policies) if one in (name, short)]
    return places[0] if places else len(policies) if name == FULL else -1


def _place(row: Row) -> tuple[str, str]:
    return row["study"], row["policy"]


def _check(row: Row) -> None:
    """Check that figures can be drawn of a cell.

    Raises:
        InputError: a number of bytes is missing or 0.
    """
    for name in REQUIRED_BYTES:
        if not (row.get(name) or 0) > 0:
            raise InputError(
                f"A cell of {row['policy']} on {row['task']} must have {name} above 0, got "
                f"{row.get(name)!r}: measure it again, or name files that larder bench has written."
            )


def parse_figure(spelling: str) -> Figure:
    """Figure of a spelling: `quality`, or `quality(score="f1")`.

    Raises:
        UsageError: the spelling is not one figure.
        UnknownName: the figure or a parameter does not exist.
        BadParameter: a value is out of range.
    """
    calls = parse(spelling, "figure")
    if len(calls) != 1:
        raise UsageError(f"--figure takes one figure, got {spelling!r}: give the option twice.")
    return build(FIGURES.load(calls[0].name), calls[0].parameters)


def draw_figures(
    figures: Sequence[Figure], results: Results, styles: PolicyStyles
) -> list[Drawing]:
    """Drawings of the selected figures.

    Raises:
        NothingToDraw: the results do not suffice for one of the figures.
    """
    return [drawing for figure in figures for drawing in figure.draw(results, styles)]


def draw_all(results: Results, styles: PolicyStyles) -> list[Drawing]:
    """Drawings of every figure that the results suffice for, with default parameters."""
    drawings: list[Drawing] = []
    for name in FIGURE_ORDER:
        try:
            drawings += FIGURES.load(name)().draw(results, styles)
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
    "rate_distortion",
)
