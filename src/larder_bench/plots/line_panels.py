"""Panels of lines: a single one with labels at the ends of lines, several on a page with a
legend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any

import polars as pl

from larder_bench.plots.layout import (
    LINE_HEIGHT,
    Margins,
    PanelGrid,
    draw_legend,
    label_ends,
    legend_lines,
    text_width,
    wrap_text,
)
from larder_bench.plots.policy_styles import SOLID, PolicyStyle, styles_for
from larder_bench.plots.style import COLUMN, PAGE, SMALL, TITLE

PANELS_PER_ROW = 3  # panels side by side on a page
HEIGHT = 1.75  # inches of a single panel; panels side by side have three quarters of it
ROOM = 0.2  # doublings beyond the outermost values and ticks of a logarithmic scale
BOTTOM, TITLED = 0.38, 0.24  # inches below panels for axis labels, above them for titles
LEAD = 0.12  # inches from line to line of a title
_TICK, _LABEL = 0.07, 0.15  # inches beside tick labels, and for an axis label


@dataclass(frozen=True)
class Line:
    """Line of a panel.

    Args:
        name: name of its style.
        lows: lower ends of its bars; empty for a line without bars.
        highs: upper ends of its bars.
    """

    name: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    lows: tuple[float, ...] = ()
    highs: tuple[float, ...] = ()


@dataclass(frozen=True)
class LinePanel:
    """Lines that share their axes.

    Args:
        levels: values that do not depend on x, drawn as horizontal lines.
    """

    title: str
    lines: tuple[Line, ...]
    levels: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Axis:
    """Scale shared by all panels.

    Args:
        ticks: positions of ticks, ascending, and their labels.
        low: lower end.
        high: upper end.
        base: base of the logarithm; 0 for a linear scale.
    """

    label: str
    ticks: tuple[tuple[float, str], ...]
    low: float
    high: float
    base: int = 0


def mean_lines(points: Iterable[tuple[str, float, float]]) -> tuple[Line, ...]:
    """Line of each policy through the means of its points at each x.

    Args:
        points: policy, x and y.
    """
    frame = pl.DataFrame(list(points), ["policy", "x", "y"], orient="row")
    lines: list[Line] = []
    for (policy,), of_policy in frame.group_by("policy", maintain_order=True):
        means = of_policy.group_by("x").agg(pl.mean("y")).sort("x")
        lines.append(Line(str(policy), tuple(means["x"]), tuple(means["y"])))
    return tuple(lines)


def log2_axis(label: str, values: Sequence[float], names: Any) -> Axis:
    """Logarithmic scale of base 2 around all values, which are above 0.

    Args:
        names: returns the label of a tick for its exponent of 2.
    """
    first, last = round(log2(min(values))), round(log2(max(values)))
    step = max(1, -(-(last - first) // 7))
    ticks = tuple((2.0**power, names(power)) for power in range(first, last + 1, step))
    low, high = min(*values, ticks[0][0]), max(*values, ticks[-1][0])
    return Axis(label, ticks, low / 2**ROOM, high * 2**ROOM, base=2)


def linear_axis(label: str, low: float, high: float) -> Axis:
    """Linear scale whose ticks are round numbers within its ends."""
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    slack = 1e-6 * (high - low)
    inside = [float(tick) for tick in ticks if low - slack <= tick <= high + slack]
    digits = max((len(f"{tick:g}".partition(".")[2]) for tick in inside), default=0)
    names = [f"{tick + 0.0:.{digits}f}".replace("-", "−") for tick in inside]
    return Axis(label, tuple(zip(inside, names, strict=True)), low, high)


def draw_panels(
    panels: Sequence[LinePanel],
    styles: dict[str, PolicyStyle],
    x: Axis,
    y: Axis,
) -> Any:
    """Figure of panels.

    Args:
        styles: style of every line, in the order of the legend.
    """
    left = _LABEL + max(text_width(name, SMALL) for _, name in y.ticks) + _TICK
    styles = styles_for(styles, {name for panel in panels for name in _names(panel)})
    if len(panels) == 1:
        return _single_panel(panels[0], styles, x, y, left)
    return _panel_row(panels, styles, x, y, left)


def _single_panel(
    panel: LinePanel, styles: dict[str, PolicyStyle], x: Axis, y: Axis, left: float
) -> Any:
    ends = [
        (line.ys[-1], styles[line.name]) for line in panel.lines if styles[line.name].is_labeled
    ]
    ends += [(level, styles[name]) for name, level in panel.levels]
    names = max((text_width(style.name, SMALL) for _, style in ends), default=0.0)
    # A title may extend above the labels.
    title = wrap_text(panel.title, COLUMN - left - 0.05, TITLE, 2)
    top = TITLED + LEAD * (len(title) - 1)
    grid = PanelGrid(COLUMN, 1, 1, HEIGHT, Margins(left, names + 0.22, top, BOTTOM))
    figure = grid.figure()
    axes = grid.panel(figure, 0)
    _draw(axes, panel, styles)
    _scale(axes, x, y, grid.panel_width)
    axes.set_title("\n".join(title), linespacing=1.1)
    axes.set_xlabel(x.label)
    axes.set_ylabel(y.label)
    label_ends(figure, axes, ends)
    return figure


def _panel_row(
    panels: Sequence[LinePanel],
    styles: dict[str, PolicyStyle],
    x: Axis,
    y: Axis,
    left: float,
) -> Any:
    levels = _named_levels(panels, styles)
    drawn = {line.name for panel in panels for line in panel.lines}
    labeled = [
        style
        for name, style in styles.items()
        if style.is_labeled and (name in drawn or not levels)
    ]
    legend = legend_lines(labeled, PAGE - left)
    columns = min(PANELS_PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    margins = Margins(left, 0.08 + levels, 0.06 + len(legend) * LINE_HEIGHT + TITLED, BOTTOM)
    grid = PanelGrid(PAGE, rows, columns, 0.75 * HEIGHT, margins, gap_x=0.18 + levels, gap_y=0.46)
    titles = [wrap_text(panel.title, grid.panel_width, TITLE, 2) for panel in panels]
    if more := LEAD * (max(map(len, titles)) - 1):
        margins = replace(margins, top=margins.top + more)
        grid = replace(grid, margins=margins, gap_y=grid.gap_y + more)
    figure = grid.figure()
    draw_legend(figure, legend, left)
    for index, panel in enumerate(panels):
        axes = grid.panel(figure, index)
        _draw(axes, panel, styles)
        _scale(axes, x, y, grid.panel_width)
        axes.set_title("\n".join(titles[index]), linespacing=1.1)
        if index % columns:
            axes.set_yticklabels([])
        else:
            axes.set_ylabel(y.label)
        if grid.is_bottom(index, len(panels)):
            axes.set_xlabel(x.label)
        if levels:
            label_ends(figure, axes, [(level, styles[name]) for name, level in panel.levels])
    return figure


def _named_levels(panels: Sequence[LinePanel], styles: dict[str, PolicyStyle]) -> float:
    """Inches next to each panel for the labels of its levels; 0 if a legend distinguishes them.

    Dashes do not suffice for more than two levels.
    """
    if max(len(panel.levels) for panel in panels) < 3:
        return 0.0
    names = {styles[name].name for panel in panels for name, _ in panel.levels}
    return 0.13 + max(text_width(name, SMALL) for name in names)


def _draw(axes: Any, panel: LinePanel, styles: dict[str, PolicyStyle]) -> None:
    for name, level in panel.levels:
        style = styles[name]
        axes.axhline(level, color=style.color, linestyle=style.dashes, linewidth=0.9, label=name)
    # Pale lines first, then controls, then compared policies on top.
    for line in sorted(panel.lines, key=lambda line: _rank(styles[line.name])):
        style, rank = styles[line.name], 2 + _rank(styles[line.name])
        if line.lows and style.is_labeled and not style.is_control:
            axes.vlines(
                line.xs, line.lows, line.highs, color=style.color, linewidth=0.7, zorder=rank
            )
        axes.plot(
            line.xs,
            line.ys,
            color=style.color,
            linestyle=style.dashes,
            linewidth=1.3 if style.dashes == SOLID and style.is_labeled else 0.9,
            # A control with a single point is a dash.
            marker=style.marker or ("_" if len(line.xs) == 1 else None),
            zorder=rank,
            clip_on=False,
            label=line.name,
        )


def _scale(axes: Any, x: Axis, y: Axis, width: float) -> None:
    if x.base:
        axes.set_xscale("log", base=x.base)
    if y.base:
        axes.set_yscale("log", base=y.base)
    axes.set_xlim(x.low, x.high)
    axes.set_ylim(y.low, y.high)
    ticks = _fitting(x.ticks, width)
    axes.set_xticks([tick for tick, _ in ticks], [name for _, name in ticks])
    axes.set_yticks([tick for tick, _ in y.ticks], [name for _, name in y.ticks])
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _fitting(ticks: Sequence[tuple[float, str]], width: float) -> Sequence[tuple[float, str]]:
    """Ticks whose labels do not overlap: all, or every second, every third, ..."""
    step = 1
    while sum(text_width(name, SMALL) + 0.08 for _, name in ticks[::step]) > width and step < len(
        ticks
    ):
        step += 1
    return ticks[::step]


def _rank(style: PolicyStyle) -> int:
    return 0 if not style.is_labeled else 1 if style.is_control else 2


def _names(panel: LinePanel) -> list[str]:
    return [line.name for line in panel.lines] + [name for name, _ in panel.levels]
