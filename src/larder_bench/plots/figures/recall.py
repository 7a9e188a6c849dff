"""Recall of the true nearest keys by index; IceCache's figure 3.

A panel for each k, and for each layer where rows tell layers apart. The curve runs over the entries
that are fetched, the length of the context, or the steps of decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from larder_bench.plots import score_groups
from larder_bench.plots.figures.base import Figure, PolicyStyles, drawing_name
from larder_bench.plots.line_panels import (
    Axis,
    Line,
    LinePanel,
    draw_panels,
    linear_axis,
    log2_axis,
)
from larder_bench.plots.style import Drawing, figure_style
from larder_bench.results.budget_labels import sort_budgets
from larder_bench.results.rows import Results, Row


class RecallAxis(Enum):
    """X axis of a curve: entries that are fetched, tokens of context, or decoding steps."""

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
        along: `fetched_tokens`, `tokens` or `step`.
    """

    along: RecallAxis = RecallAxis.FETCHED

    def draw(self, results: Results, looks: PolicyStyles) -> list[Drawing]:
        charts = self.charts(results, looks)
        if not charts:
            raise self.nothing(f"rows of kind 'recall' with {self.along.value}")
        caption = (
            "Recall: the share of the k entries with the largest products that each index finds, "
            f"against {_TITLES[self.along]}; means over files."
        )
        return [
            Drawing(
                drawing_name("recall", number, len(charts)),
                score_groups.join_words("Recall of the indexes", label),
                caption,
                self._figure(panels, looks),
            )
            for number, (label, panels) in enumerate(charts)
        ]

    def charts(self, results: Results, looks: PolicyStyles) -> list[tuple[str, list[LinePanel]]]:
        """Plotted numbers: a sheet for each study and model."""
        key = self.along.value
        rows = [r for r in results.shown("recall") if r["policy"] in looks and r[key] is not None]
        # What fetches without a limit has no place on a scale of doublings.
        rows = [row for row in rows if self.along is RecallAxis.STEP or row[key] > 0]
        if self.along is not RecallAxis.STEP and (whole := [r for r in rows if r["layer"] is None]):
            rows = whole  # beside them are layers and steps one by one
        return [
            (label, self._panels(own))
            for label, own in score_groups.comparable_sheets(
                score_groups.repeat_unmatched(rows)
            ).items()
        ]

    def _panels(self, rows: Sequence[Row]) -> list[LinePanel]:
        ranks = sorted({int(rank) for row in rows for rank in row["recall"]})
        layers = list(dict.fromkeys(row["layer"] for row in rows))
        # Budgets lie along the entries that are fetched; anywhere else they are apart.
        is_apart = self.along is not RecallAxis.FETCHED and len({row["budget"] for row in rows}) > 1
        budgets = sort_budgets(list({row["budget"] for row in rows})) if is_apart else [""]
        return [
            LinePanel(score_groups.join_words(f"recall@{rank}", _of_layer(layer), budget), lines)
            for budget in budgets
            for layer in layers
            for rank in ranks
            if (lines := self._lines(_rows_of(rows, layer, budget), str(rank)))
        ]

    def _figure(self, panels: Sequence[LinePanel], looks: PolicyStyles) -> object:
        ends = [y for panel in panels for line in panel.lines for y in line.ys]
        low = 0.0 if min(ends) < 0.5 else 0.1 * math.floor(10 * min(ends) - 0.2)
        with figure_style():
            x = self._across([x for panel in panels for line in panel.lines for x in line.xs])
            return draw_panels(panels, dict(looks), x, linear_axis("recall", low, 1.02))

    def _lines(self, rows: Sequence[Row], rank: str) -> tuple[Line, ...]:
        found: dict[str, dict[float, list[float]]] = {}
        for row in rows:
            if rank in row["recall"]:
                points = found.setdefault(row["policy"], {})
                points.setdefault(float(row[self.along.value]), []).append(row["recall"][rank])
        return tuple(
            Line(policy, tuple(sorted(own)), tuple(float(np.mean(own[x])) for x in sorted(own)))
            for policy, own in found.items()
        )

    def _across(self, values: Sequence[float]) -> Axis:
        label = _TITLES[self.along]
        if self.along is not RecallAxis.STEP:
            return log2_axis(label, values, _count)
        room = 0.04 * (max(values) - min(values) or 1.0)
        return linear_axis(label, min(values) - room, max(values) + room)


def _of_layer(layer: int | None) -> str:
    return "" if layer is None else f"layer {layer}"


def _rows_of(rows: Sequence[Row], layer: int | None, budget: str) -> list[Row]:
    own = [row for row in rows if row["layer"] == layer]
    return [row for row in own if budget in ("", row["budget"])]


def _count(power: int) -> str:
    return f"{2 ** (power - 10)}K" if power >= 10 else str(2**power)


Part = RecallFigure
