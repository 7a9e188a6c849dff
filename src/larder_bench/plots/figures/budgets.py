"""Entries kept by each kv head of each layer, as a budget part allocates them.

One panel per policy; layers from top to bottom, heads from left to right. Bars at the right are the
means of layers, the line through them is the mean of all: they show D2O's and EpiCache's budgets by
layer. Layers with a sliding window, which have no budget, are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from larder_bench.plots import score_groups
from larder_bench.plots.figures.base import Figure, PolicyStyles, drawing_name, panel_policies
from larder_bench.plots.heatmap import ColorScale, draw_color_key, draw_heatmap
from larder_bench.plots.layout import Margins, PanelGrid, axes_at, plain_axes, text_width
from larder_bench.plots.policy_styles import short_label
from larder_bench.plots.style import COLUMN, FAINT, PAGE, SOFT, TITLE, Drawing, figure_style
from larder_bench.results.rows import Results, Row

BARS, BETWEEN = 0.3, 0.06  # inches
TALL, SHORT, HIGHEST = 0.15, 0.05, 2.6  # inches: height of a layer, and maximum of all layers


@dataclass(frozen=True)
class BudgetPanel:
    """Mean number of entries that a policy keeps, over files and episodes.

    Args:
        lengths: entries by layer and head; None in layers without a budget.
        layers: mean number of entries of each layer's heads.
        context: mean number of tokens read.
    """

    policy: str
    lengths: tuple[tuple[float | None, ...], ...]
    layers: tuple[float | None, ...]
    context: float


@dataclass(frozen=True)
class BudgetsFigure(Figure):
    """Budgets by layer and head."""

    def draw(self, results: Results, styles: PolicyStyles) -> list[Drawing]:
        charts = self.charts(results, styles)
        if not charts:
            raise self.nothing("rows of kind 'budgets'")
        return [
            Drawing(
                drawing_name("budgets", index, len(charts)),
                f"Budgets by layer and head: {title}",
                _caption(title, panels),
                _figure(panels),
            )
            for index, (title, panels) in enumerate(charts)
        ]

    def charts(self, results: Results, styles: PolicyStyles) -> list[tuple[str, list[BudgetPanel]]]:
        """Plotted numbers: the panels of each task and budget."""
        rows = [row for row in results.exhibits_of("budgets") if row["policy"] in styles]
        groups = score_groups.group_cells(rows, "matched", "measure")
        titles = score_groups.group_titles(list(groups))
        charts: list[tuple[str, list[BudgetPanel]]] = []
        for group, group_rows in groups.items():
            for budget in dict.fromkeys(row["budget"] for row in group_rows):
                selected = [row for row in group_rows if row["budget"] == budget]
                policies = [p for p in styles if any(row["policy"] == p for row in selected)]
                charts.append(
                    (
                        f"{titles[group]}, budget {budget}",
                        [
                            _panel(policy, [row for row in selected if row["policy"] == policy])
                            for policy in panel_policies(policies, styles)
                        ],
                    )
                )
        return charts


def _panel(policy: str, rows: Sequence[Row]) -> BudgetPanel:
    context = float(np.mean([row["context_tokens"] for row in rows]))
    sliding = set(rows[0]["sliding_layers"])
    lengths = tuple(
        (None,) * len(layer)
        if index in sliding
        else tuple(
            float(np.mean([row["lengths"][index][head] for row in rows]))
            for head in range(len(layer))
        )
        for index, layer in enumerate(rows[0]["lengths"])
    )
    means = tuple(
        None if index in sliding else float(np.mean(np.array(layer, dtype=float)))
        for index, layer in enumerate(lengths)
    )
    return BudgetPanel(policy, lengths, means, context)


def _figure(panels: Sequence[BudgetPanel]) -> Any:
    layers, heads = len(panels[0].lengths), max(len(line) for line in panels[0].lengths)
    # High enough to distinguish neighboring layers, low enough for a page.
    height = min(HIGHEST, max(TALL * layers if layers <= 16 else SHORT * layers, 0.6))
    left = 0.4
    names = max(text_width(short_label(panel.policy), TITLE) for panel in panels)
    least = max(0.09 * heads, 0.5, names - BARS) + BETWEEN + BARS
    columns = max(1, min(len(panels), int((PAGE - left) / (least + 0.22))))
    fits = left + columns * (least + 0.22) <= COLUMN
    rows = -(-len(panels) // columns)
    width = COLUMN if fits else PAGE
    grid = PanelGrid(width, rows, columns, height, Margins(left, 0.06, 0.5, 0.36), 0.22, 0.42)
    values = [v for panel in panels for line in panel.lengths for v in line if v is not None]
    scale = ColorScale(0.0, max(values, default=1.0))
    with figure_style():
        figure = grid.figure()
        ends = ("0", f"{scale.high:,.0f}")
        draw_color_key(figure, scale, ends, "entries kept by a head", left)
        for index, panel in enumerate(panels):
            axes = grid.panel(figure, index)
            bars = _bar_axes(figure, axes)
            draw_heatmap(axes, panel.lengths, scale)
            axes.set_title(short_label(panel.policy))
            plain_axes(axes)
            is_first = index % columns == 0
            axes.set_yticks(*_ticks(layers) if is_first else ([], []))
            axes.set_xticks(*_ticks(heads))
            if is_first:
                axes.set_ylabel("layer")
            if grid.is_bottom(index, len(panels)):
                axes.set_xlabel("kv head")
            _bars(bars, panel, max(m for p in panels for m in p.layers if m is not None))
    return figure


def _bar_axes(figure: Any, axes: Any) -> Any:
    """Axes for bars at the right of a panel, which is made narrower."""
    width, height = figure.get_size_inches()
    box = axes.get_position()
    share = (BARS + BETWEEN) / width
    axes.set_position((box.x0, box.y0, box.width - share, box.height))
    return axes_at(figure, box.x1 * width - BARS, box.y0 * height, BARS, box.height * height)


def _bars(axes: Any, panel: BudgetPanel, most: float) -> None:
    """Draw the mean of each layer, and a thin line at the mean of all."""
    known = [(number, mean) for number, mean in enumerate(panel.layers) if mean is not None]
    axes.barh(
        [number + 0.5 for number, _ in known],
        [mean for _, mean in known],
        height=0.72,
        color=FAINT,
        linewidth=0,
    )
    axes.set_ylim(len(panel.layers), 0)
    axes.set_xlim(0, most * 1.02)
    if known:
        axes.axvline(float(np.mean([mean for _, mean in known])), color=SOFT, linewidth=0.6)
    plain_axes(axes)
    axes.set_xticks([])
    axes.set_yticks([])


def _ticks(count: int) -> tuple[list[float], list[str]]:
    """Centers of some cells, with their numbers."""
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64) if count / step <= 8 or step == 64)
    shown = list(range(0, count, step))
    return [number + 0.5 for number in shown], [str(number) for number in shown]


def _caption(title: str, panels: Sequence[BudgetPanel]) -> str:
    return (
        "Entries that each kv head of each layer keeps, as a mean over files and episodes, of "
        f"{panels[0].context:,.0f} that were read ({title}). Bars at the right are the means of "
        "layers, the line through them the mean of all. Layers with a sliding window are empty."
    )


Part = BudgetsFigure
