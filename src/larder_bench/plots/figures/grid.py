"""Share of needles found, by the length of the text and the depth of the needle.

One panel per policy, one figure per task and budget; the beginning of the text is at the top. A
cell is the mean of all items with that depth; empty if there are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from larder.core import BadParameter
from larder_bench.plots import score_groups
from larder_bench.plots.figures.base import Figure, PolicyStyles, drawing_name, panel_policies
from larder_bench.plots.heatmap import ColorScale, draw_color_key, draw_heatmap
from larder_bench.plots.layout import Margins, PanelGrid, plain_axes, text_width
from larder_bench.plots.policy_styles import FULL, controls_last, short_label
from larder_bench.plots.style import COLUMN, NORMAL, PAGE, SMALL, TITLE, Drawing, figure_style
from larder_bench.results.rows import Results, Row

CELL_HEIGHT, LEAST_WIDTH, MOST_WIDTH = 0.17, 0.24, 0.42  # inches
ACROSS = "tokens of context"
LEFT, RIGHT, GAP = 0.48, 0.08, 0.18  # inches beside and between panels


@dataclass(frozen=True)
class GridPanel:
    """Grid of one policy.

    Args:
        means: mean scores by depth, then by length; None without questions.
        counts: number of items of each mean.
    """

    policy: str
    means: tuple[tuple[float | None, ...], ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class GridChart:
    """Grids of one task at one budget."""

    title: str
    lengths: tuple[int, ...]
    panels: tuple[GridPanel, ...]


@dataclass(frozen=True)
class NeedleGrid(Figure):
    """Needle grid.

    Args:
        score: exact, f1, f1_stemmed, or another score in [0, 1].
        depths: number of rows of the grid.
    """

    score: str = "exact"
    depths: int = 5

    def __post_init__(self) -> None:
        if self.depths < 1:
            raise BadParameter(f"grid.depths must be at least 1, got {self.depths}.")
        if self.score not in score_groups.BOUNDED:
            known = ", ".join(sorted(score_groups.BOUNDED))
            raise BadParameter(f"grid.score must be one of {known}, got {self.score!r}.")

    def draw(self, results: Results, styles: PolicyStyles) -> list[Drawing]:
        charts = self.charts(results, styles)
        if not charts:
            with_depth = [row for row in results.measured if _items_with_depth(row)]
            raise score_groups.missing_score_error("grid", self.score, with_depth) or self.nothing(
                "cells of two lengths or more whose items have a depth, as those of needles"
            )
        return [
            Drawing(
                drawing_name("grid", index, len(charts)),
                f"Needle grid: {chart.title}",
                self._caption(chart),
                self._figure(chart),
            )
            for index, chart in enumerate(charts)
        ]

    def charts(self, results: Results, styles: PolicyStyles) -> list[GridChart]:
        """Plotted numbers."""
        cells = [
            row for row in results.measured if row["policy"] in styles and _items_with_depth(row)
        ]
        cells = [row for row in cells if score_groups.scores_by_seed({0: row}, self.score)]
        groups = score_groups.group_cells(cells, "tokens")
        titles = score_groups.group_titles(list(groups))
        charts: list[GridChart] = []
        for group, rows in groups.items():
            lengths = tuple(sorted({row["tokens"] for row in rows}))
            if len(lengths) < 2:
                continue
            full = [row for row in rows if row["policy"] == FULL]
            others = [row for row in rows if row["policy"] != FULL]
            for budget in dict.fromkeys(row["budget"] for row in others or full):
                selected = [row for row in others if row["budget"] == budget] + full
                order = [
                    FULL,
                    *(policy for policy in controls_last(list(styles)) if policy != FULL),
                ]
                present = [p for p in order if any(row["policy"] == p for row in selected)]
                panels = [
                    self._panel(policy, selected, lengths)
                    for policy in panel_policies(present, styles)
                ]
                title = f"{titles[group]}, budget {budget}" if others else titles[group]
                charts.append(GridChart(title, lengths, tuple(panels)))
        return charts

    def _panel(self, policy: str, rows: Sequence[Row], lengths: Sequence[int]) -> GridPanel:
        cells: dict[tuple[int, int], list[float]] = {}
        for row in rows:
            if row["policy"] != policy:
                continue
            for item in _items_with_depth(row):
                cell = min(int(item["depth"] * self.depths), self.depths - 1), row["tokens"]
                for value in score_groups.scores_by_seed(
                    {0: {"items": [item]}}, self.score
                ).values():
                    cells.setdefault(cell, []).extend(value)
        return GridPanel(
            policy,
            tuple(tuple(_mean(cells, d, t) for t in lengths) for d in range(self.depths)),
            tuple(tuple(len(cells.get((d, t), ())) for t in lengths) for d in range(self.depths)),
        )

    def _figure(self, chart: GridChart) -> Any:
        count, lengths = len(chart.panels), len(chart.lengths)
        names = max(text_width(short_label(panel.policy), TITLE) for panel in chart.panels)
        below = text_width(ACROSS, NORMAL)
        least = max(LEAST_WIDTH * lengths, names, below)
        columns = max(1, min(count, int((PAGE - LEFT - RIGHT + GAP) / (least + GAP))))
        width = COLUMN if LEFT + RIGHT + columns * (least + GAP) - GAP <= COLUMN else PAGE
        # Wider cells carry no more information: the rest of the width stays empty.
        most = max(MOST_WIDTH * lengths, names, below)
        free = width - LEFT - RIGHT - columns * (most + GAP) + GAP
        rows = -(-count // columns)
        margins = Margins(LEFT, RIGHT + max(0.0, free), 0.5, 0.36)
        sheet = PanelGrid(width, rows, columns, CELL_HEIGHT * self.depths, margins, GAP, 0.4)
        with figure_style():
            figure = sheet.figure()
            title = score_groups.score_title(self.score)
            draw_color_key(figure, ColorScale(0.0, 1.0), ("0", "1"), title, LEFT)
            for index, panel in enumerate(chart.panels):
                axes = sheet.panel(figure, index)
                self._draw(axes, panel, sheet.panel_width / lengths)
                _name(axes, chart, self.depths, index % columns == 0)
                if sheet.is_bottom(index, count):
                    axes.set_xlabel(ACROSS)
        return figure

    def _draw(self, axes: Any, panel: GridPanel, wide: float) -> None:
        texts = [["" if v is None else _decimal(v) for v in line] for line in panel.means]
        fits = wide >= text_width(".00", SMALL) + 0.06
        draw_heatmap(axes, panel.means, ColorScale(0.0, 1.0), texts if fits else None)
        axes.set_title(short_label(panel.policy))
        plain_axes(axes)

    def _caption(self, chart: GridChart) -> str:
        counts = [count for panel in chart.panels for line in panel.counts for count in line]
        nonzero = [count for count in counts if count]
        return (
            f"{score_groups.capitalize(score_groups.score_title(self.score))} by length of the "
            "context and depth "
            f"of the needle in it (0% is the beginning), policy by policy. {chart.title}; "
            f"{_range(nonzero)} items per cell."
        )


def _name(axes: Any, chart: GridChart, depths: int, is_first: bool) -> None:
    ticks = [index + 0.5 for index in range(len(chart.lengths))]
    axes.set_xticks(ticks, [_tokens(length) for length in chart.lengths])
    axes.set_yticks([0, depths / 2, depths], ["0%", "50%", "100%"] if is_first else [])
    if is_first:
        axes.set_ylabel("depth")


def _items_with_depth(row: Row) -> list[Row]:
    """Scored items with a depth."""
    return [item for item in score_groups.counted_items(row) if item.get("depth") is not None]


def _mean(cells: Mapping[tuple[int, int], list[float]], depth: int, tokens: int) -> float | None:
    values = cells.get((depth, tokens))
    return sum(values) / len(values) if values else None


def _decimal(value: float) -> str:
    text = f"{value:.2f}"
    return text[0] if text in ("0.00", "1.00") else text.removeprefix("0")


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _tokens(tokens: int) -> str:
    return f"{tokens / 1000:g}K" if tokens >= 1000 else str(tokens)


Part = NeedleGrid
