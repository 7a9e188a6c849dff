"""Divergence from the full cache against bytes, on two logarithmic scales.

One panel per kind of item: the tokens that follow a text, and a recited passage of it (the measure
`divergence`). A point is a policy at one budget: the bytes that it held, as a share of the full
cache's, and the mean of KL(full cache || policy) with its 95% bootstrap interval over files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from larder_bench.plots import score_groups
from larder_bench.plots.figures.base import Figure, PolicyStyles, drawing_name
from larder_bench.plots.line_panels import Line, LinePanel, draw_panels, log2_axis
from larder_bench.plots.policy_styles import FULL, controls_last
from larder_bench.plots.style import Drawing, figure_style
from larder_bench.results.rows import Results, Row

SCORE = "kl"
KINDS = {"next": "The tokens that follow", "recited": "A passage recited on request"}
LEAST = 1e-6  # nats that are drawn for less


@dataclass(frozen=True)
class RateDistortion(Figure):
    """Divergence against bytes."""

    def draw(self, results: Results, styles: PolicyStyles) -> list[Drawing]:
        cells = [row for row in results.measured if _is_shown(row) and row["policy"] in styles]
        sheets = [
            (label, group)
            for label, rows in score_groups.comparable_sheets(cells).items()
            for group in score_groups.group_cells(rows).values()
        ]
        if not sheets:
            raise self.nothing("cells of the measure divergence")
        return [
            Drawing(
                drawing_name("rate_distortion", index, len(sheets)),
                score_groups.join_words("Divergence against bytes", label),
                _caption(rows),
                _figure(rows, styles),
            )
            for index, (label, rows) in enumerate(sheets)
        ]


def _is_shown(row: Row) -> bool:
    kinds = {item.get("kind") for item in row.get("items", ())}
    return row["policy"] != FULL and not kinds.isdisjoint(KINDS)


def _figure(rows: Sequence[Row], styles: PolicyStyles) -> object:
    shown = {name: styles[name] for name in controls_last(list(styles))}
    panels = [LinePanel(title, _lines(rows, kind)) for kind, title in KINDS.items()]
    lines = [line for panel in panels for line in panel.lines]
    with figure_style():
        shares = log2_axis(
            "bytes, share of the full cache", [x for line in lines for x in line.xs], _fraction
        )
        ends = [y for line in lines for y in (*line.lows, *line.highs)]
        nats = log2_axis("nats per token", ends, lambda power: f"{2.0**power:.1g}")
        return draw_panels(panels, shown, shares, nats)


def _lines(rows: Sequence[Row], kind: str) -> tuple[Line, ...]:
    """Line of each policy, the smallest share first."""
    points: dict[str, list[tuple[float, ...]]] = {}
    for (policy, _), cells in score_groups.by_policy_and_budget(rows).items():
        files = score_groups.scores_by_seed(cells, SCORE, kind)
        if not files:
            continue
        found = score_groups.mean_interval(files)
        share = fmean(
            cells[seed]["active_kv_bytes"] / cells[seed]["full_kv_bytes"] for seed in files
        )
        ends = (max(end, LEAST) for end in (found.mean, found.low, found.high))
        points.setdefault(policy, []).append((share, *ends))
    return tuple(
        Line(policy, *(tuple(column) for column in zip(*sorted(point), strict=True)))
        for policy, point in points.items()
    )


def _caption(rows: Sequence[Row]) -> str:
    files = score_groups.count_noun(len({row["seed"] for row in rows}), "file")
    return (
        "KL(full cache || policy) against the bytes that a policy holds, exact entries counted in "
        f"bfloat16. Bars are 95% bootstrap intervals over {files}."
    )


def _fraction(power: int) -> str:
    return f"1/{2**-power}" if power < 0 else str(2**power)


Part = RateDistortion
