"""Recall of the true nearest keys by index; IceCache's figure 3.

One panel per k, and per layer if rows have layers. The x axis is the number of fetched entries, the
length of the context, or the decode step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from larder_bench.plots import score_groups
from larder_bench.plots.figures.base import Figure, PolicyStyles, drawing_name
from larder_bench.plots.line_panels import (
    Axis,
    Line,
    LinePanel,
    draw_panels,
    linear_axis,
    log2_axis,
    mean_lines,
)
from larder_bench.plots.style import Drawing, figure_style
from larder_bench.results.budget_labels import sort_budgets
from larder_bench.results.rows import Results, Row


class RecallAxis(Enum):
    """X axis of a curve: fetched entries, tokens of context, or decode steps."""

    FETCHED = "fetched_tokens"
    TOKENS = "tokens"
    STEP = "step"


_TITLES = {
    RecallAxis.FETCHED: "entries fetched",
    RecallAxis.TOKENS: "tokens of context",
    RecallAxis.STEP: "decoding step",
}


@dataclass(frozen=True)
class RecallFigure(Figure):
    """Recall curves.

    Args:
        along: x axis, `fetched_tokens`, `tokens` or `step`.
    """

    along: RecallAxis = RecallAxis.FETCHED

    def draw(self, results: Results, styles: PolicyStyles) -> list[Drawing]:
        charts = self.charts(results, styles)
        if not charts:
            raise self.nothing(f"rows of kind 'recall' with {self.along.value}")
        caption = (
            "Recall: the share of the k entries with the largest products that each index finds, "
            f"against {_TITLES[self.along]}; means over files."
        )
        return [
            Drawing(
                drawing_name("recall", index, len(charts)),
                score_groups.join_words("Recall of the indexes", label),
                caption,
                self._figure(panels, styles),
            )
            for index, (label, panels) in enumerate(charts)
        ]

    def charts(self, results: Results, styles: PolicyStyles) -> list[tuple[str, list[LinePanel]]]:
        """Plotted numbers: one figure per study and model."""
        key = self.along.value
        rows = [
            r for r in results.exhibits_of("recall") if r["policy"] in styles and r[key] is not None
        ]
        # Policies that fetch without a limit have no position on a logarithmic scale.
        rows = [row for row in rows if self.along is RecallAxis.STEP or row[key] > 0]
        if self.along is not RecallAxis.STEP and (whole := [r for r in rows if r["layer"] is None]):
            rows = whole  # other rows are single layers and steps
        return [
            (label, self._panels(group))
            for label, group in score_groups.comparable_sheets(
                score_groups.repeat_unmatched(rows)
            ).items()
        ]

    def _panels(self, rows: Sequence[Row]) -> list[LinePanel]:
        ranks = sorted({int(rank) for row in rows for rank in row["recall"]})
        layers = list(dict.fromkeys(row["layer"] for row in rows))
        # Budgets differ along the axis of fetched entries; on other axes they get separate panels.
        is_separate = (
            self.along is not RecallAxis.FETCHED and len({row["budget"] for row in rows}) > 1
        )
        budgets = sort_budgets(list({row["budget"] for row in rows})) if is_separate else [""]
        return [
            LinePanel(score_groups.join_words(f"recall@{rank}", _of_layer(layer), budget), lines)
            for budget in budgets
            for layer in layers
            for rank in ranks
            if (lines := self._lines(_rows_of(rows, layer, budget), str(rank)))
        ]

    def _figure(self, panels: Sequence[LinePanel], styles: PolicyStyles) -> object:
        ends = [y for panel in panels for line in panel.lines for y in line.ys]
        low = 0.0 if min(ends) < 0.5 else 0.1 * math.floor(10 * min(ends) - 0.2)
        with figure_style():
            x = self._x_axis([x for panel in panels for line in panel.lines for x in line.xs])
            return draw_panels(panels, dict(styles), x, linear_axis("recall", low, 1.02))

    def _lines(self, rows: Sequence[Row], rank: str) -> tuple[Line, ...]:
        return mean_lines(
            (row["policy"], float(row[self.along.value]), row["recall"][rank])
            for row in rows
            if rank in row["recall"]
        )

    def _x_axis(self, values: Sequence[float]) -> Axis:
        label = _TITLES[self.along]
        if self.along is not RecallAxis.STEP:
            return log2_axis(label, values, _count)
        margin = 0.04 * (max(values) - min(values) or 1.0)
        return linear_axis(label, min(values) - margin, max(values) + margin)


def _of_layer(layer: int | None) -> str:
    return "" if layer is None else f"layer {layer}"


def _rows_of(rows: Sequence[Row], layer: int | None, budget: str) -> list[Row]:
    of_layer = [row for row in rows if row["layer"] == layer]
    return [row for row in of_layer if budget in ("", row["budget"])]


def _count(power: int) -> str:
    return f"{2 ** (power - 10)}K" if power >= 10 else str(2**power)


Part = RecallFigure
