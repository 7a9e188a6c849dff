"""Latency: prefill, first token, further tokens, and the parts of a decode step.

Dots are medians, lines reach to the 95th percentile. If results have the parts of a step, these are
stacked; IceCache's figure 6b.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from larder_bench.plots import score_groups
from larder_bench.plots.figures.base import Figure, PolicyStyles, drawing_name
from larder_bench.plots.layout import (
    LINE_HEIGHT,
    Margins,
    PanelGrid,
    overlay_axes,
    text_width,
    wrapped_entries,
)
from larder_bench.plots.line_panels import linear_axis
from larder_bench.plots.policy_styles import COLORS, FULL, short_label, styles_for
from larder_bench.plots.style import PAGE, SMALL, SOFT, Drawing, figure_style
from larder_bench.results.rows import Results, Row

ROW = 0.15  # inches from one policy to the next
_SQUARE = 0.08


@dataclass(frozen=True)
class LatencySpan:
    """Median and 95th percentile, in seconds."""

    p50: float
    p95: float


@dataclass(frozen=True)
class PolicyLatency:
    """Latency of one policy at one budget; None without timings."""

    policy: str
    budget: str
    reading: LatencySpan | None
    first: LatencySpan | None
    token: LatencySpan | None


@dataclass(frozen=True)
class StepBreakdown:
    """Parts of a policy's step, in order: their names and seconds."""

    policy: str
    budget: str
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Latency(Figure):
    """Latency, and its breakdown if the results have one.

    Args:
        task: name of the task; empty for the one with the longest texts.
        tokens: length of the context; 0 for the longest.
        budget: budget as in the results; empty for the most frequent one.
    """

    task: str = ""
    tokens: int = 0
    budget: str = ""

    def draw(self, results: Results, styles: PolicyStyles) -> list[Drawing]:
        latencies, breakdowns = self.latencies(results, styles), self.breakdowns(results, styles)
        if not latencies and not breakdowns:
            raise self.nothing("measured cells, or rows of kind 'breakdown'")
        drawings = [
            Drawing(
                drawing_name("latency", index, len(latencies)),
                f"Latency: {title}",
                f"Seconds of reading, of the first token and of each further one ({title}): dots "
                "are medians, lines reach to the 95th percentile.",
                _dots(rows, styles_for(styles, {row.policy for row in rows})),
            )
            for index, (title, rows) in enumerate(latencies)
        ]
        return drawings + [
            Drawing(
                drawing_name("breakdown", index, len(breakdowns)),
                f"Breakdown of a step: {title}",
                f"Medians of the parts of a step ({title}).",
                _stacks(rows),
            )
            for index, (title, rows) in enumerate(breakdowns)
        ]

    def latencies(
        self, results: Results, styles: PolicyStyles
    ) -> list[tuple[str, list[PolicyLatency]]]:
        """Plotted numbers of each study and model; the full cache is included at every budget."""
        cells = [row for row in results.measured if row["policy"] in styles]
        cells = [row for row in cells if row.get("latency") or row.get("prefill_seconds")]
        cells = [row for row in cells if self.task in ("", row["task"].partition("(")[0])]
        order = list(styles)
        charts: list[tuple[str, list[PolicyLatency]]] = []
        for label, rows in score_groups.comparable_sheets(cells).items():
            tokens = self.tokens or max(row["tokens"] for row in rows)
            same_length = [row for row in rows if row["tokens"] == tokens]
            selected = [row for row in same_length if row["task"] == same_length[0]["task"]]
            budget = self.budget or _most_common_budget(selected)
            cases = score_groups.by_policy_and_budget(
                [r for r in selected if r["budget"] == budget or _is_full(r)]
            )
            latencies = [
                _policy_latency(policy, budget, list(files.values()))
                for (policy, budget), files in cases.items()
            ]
            if latencies:
                latencies.sort(key=lambda one: order.index(one.policy))
                task = selected[0]["task"].partition("(")[0]
                title = score_groups.join_words(
                    label, task, f"{tokens:,} tokens", f"budget {budget}"
                )
                charts.append((title, latencies))
        return charts

    def breakdowns(
        self, results: Results, styles: PolicyStyles
    ) -> list[tuple[str, list[StepBreakdown]]]:
        """Seconds of the parts of each kind of decode step."""
        rows = [row for row in results.exhibits_of("breakdown") if row["policy"] in styles]
        groups = score_groups.group_cells(score_groups.repeat_unmatched(rows))
        titles = score_groups.group_titles(list(groups))
        return [
            (f"{titles[group]}, {step}", _step_breakdowns([r for r in cells if r["step"] == step]))
            for group, cells in groups.items()
            for step in dict.fromkeys(row["step"] for row in cells)
        ]


def _most_common_budget(rows: Sequence[Row]) -> str:
    """Most frequent budget of the policies; of equally frequent ones the first."""
    cases = dict.fromkeys((row["policy"], row["budget"]) for row in rows)
    return Counter(budget for _, budget in cases).most_common(1)[0][0] if cases else ""


def _is_full(row: Row) -> bool:
    return row["policy"] == FULL


def _policy_latency(policy: str, budget: str, rows: Sequence[Row]) -> PolicyLatency:
    reading = [row["prefill_seconds"] for row in rows if row.get("prefill_seconds")]
    spans = [row["latency"] for row in rows if row.get("latency")]
    return PolicyLatency(
        policy,
        budget,
        LatencySpan(float(np.median(reading)), float(np.quantile(reading, 0.95)))
        if reading
        else None,
        _median([span["first_token"] for span in spans if span.get("first_token")]),
        _median([span["token"] for span in spans if span.get("token")]),
    )


def _median(spans: Sequence[Row]) -> LatencySpan | None:
    """Medians over files; None without any."""
    if not spans:
        return None
    return LatencySpan(
        *(float(np.median([span[name] for span in spans])) for name in ("p50", "p95"))
    )


def _step_breakdowns(rows: Sequence[Row]) -> list[StepBreakdown]:
    breakdowns: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        parts = breakdowns.setdefault((row["policy"], row["budget"]), {})
        for part in row["parts"]:
            parts.setdefault(part["name"], []).append(part["p50"])
    return [
        StepBreakdown(
            policy, budget, tuple((name, float(np.median(each))) for name, each in parts.items())
        )
        for (policy, budget), parts in breakdowns.items()
    ]


def _names(rows: Sequence[PolicyLatency] | Sequence[StepBreakdown]) -> list[str]:
    """Labels of rows: the policy, with its budget if it has several."""
    several = len({row.policy for row in rows}) < len(rows)
    return [
        f"{short_label(row.policy)}, {row.budget}" if several else short_label(row.policy)
        for row in rows
    ]


def _dots(rows: Sequence[PolicyLatency], styles: PolicyStyles) -> Any:
    columns = [("reading", [row.reading for row in rows])]
    columns += [("first token", [row.first for row in rows])]
    columns += [("each further token", [row.token for row in rows])]
    present = [(title, spans) for title, spans in columns if any(spans)]
    names = _names(rows)
    left = max(text_width(name, SMALL) for name in names) + 0.12
    width = PAGE if len(present) > 1 else 3.3
    margins = Margins(left, 0.12, 0.26, 0.36)
    grid = PanelGrid(width, 1, len(present), ROW * len(rows) + 0.08, margins, gap_x=0.22)
    with figure_style():
        figure = grid.figure()
        for number, (title, spans) in enumerate(present):
            axes = grid.panel(figure, number)
            factor, unit = _unit([span.p95 for span in spans if span])
            for index, (row, span) in enumerate(zip(rows, spans, strict=True)):
                if span is None:
                    continue
                style = styles[row.policy]
                ends = [span.p50 * factor, span.p95 * factor]
                axes.plot(ends, [index] * 2, color=style.color, linewidth=1.0)
                axes.plot(ends[:1], [index], color=style.color, marker=style.marker or "o", ms=3.6)
            _scale_from_zero(axes, max(span.p95 for span in spans if span) * factor * 1.06)
            axes.set_ylim(len(rows) - 0.4, -0.6)
            axes.set_yticks(range(len(rows)), [] if number else names)
            _plain_axis(axes)
            axes.set_title(title)
            axes.set_xlabel(unit)
    return figure


def _stacks(rows: Sequence[StepBreakdown]) -> Any:
    names = _names(rows)
    kinds = _in_order([[name for name, _ in row.parts] for row in rows])
    colors = {kind: COLORS[number % len(COLORS)][0] for number, kind in enumerate(kinds)}
    left = max(text_width(name, SMALL) for name in names) + 0.12
    factor, unit = _unit([sum(value for _, value in row.parts) for row in rows])
    totals = [sum(value for _, value in row.parts) * factor for row in rows]
    lines = _key_lines(kinds, PAGE / 2 - left)
    top = 0.1 + LINE_HEIGHT * len(lines)
    grid = PanelGrid(3.3, 1, 1, ROW * len(rows) + 0.08, Margins(left, 0.42, top, 0.36))
    with figure_style():
        figure = grid.figure()
        axes = grid.panel(figure, 0)
        for index, row in enumerate(rows):
            begin = 0.0
            for kind, value in row.parts:
                axes.barh(index, value * factor, left=begin, height=0.62, color=colors[kind], lw=0)
                begin += value * factor
            axes.annotate(
                f"{begin:.3g}", (begin, index), (3, 0), textcoords="offset points",
                size=SMALL, color=SOFT, va="center",
            )  # fmt: skip
        _scale_from_zero(axes, max(totals))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks(range(len(rows)), names)
        _plain_axis(axes)
        axes.set_xlabel(unit)
        _draw_key(figure, lines, colors, left)
    return figure


def _in_order(lists: Sequence[Sequence[str]]) -> list[str]:
    """All names, each after those that precede it in any list, as far as the lists agree."""
    order: list[str] = []
    for names in lists:
        index = 0
        for name in names:
            if name not in order:
                order.insert(index, name)
            index = order.index(name) + 1
    return order


def _scale_from_zero(axes: Any, most: float) -> None:
    """Set a scale from 0 to the maximum, with round ticks."""
    scale = linear_axis("", 0.0, most)
    axes.set_xlim(scale.low, scale.high)
    ticks = scale.ticks if len(scale.ticks) <= 6 else scale.ticks[::2]
    axes.set_xticks([tick for tick, _ in ticks], [name for _, name in ticks])


def _plain_axis(axes: Any) -> None:
    axes.grid(axis="x")
    axes.tick_params(axis="both", length=0)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_visible(False)


def _key_lines(kinds: Sequence[str], width: float) -> list[list[str]]:
    return wrapped_entries(kinds, [_key_width(kind) for kind in kinds], width)


def _key_width(kind: str) -> float:
    return _SQUARE + 0.05 + text_width(kind, SMALL) + 0.14


def _draw_key(
    figure: Any, lines: Sequence[Sequence[str]], colors: dict[str, str], left: float
) -> None:
    from matplotlib.patches import Rectangle

    overlay = overlay_axes(figure)
    for index, line in enumerate(lines):
        x, y = left, figure.get_size_inches()[1] - 0.08 - (index + 0.5) * LINE_HEIGHT
        for kind in line:
            overlay.add_patch(
                Rectangle((x, y - _SQUARE / 2), _SQUARE, _SQUARE, facecolor=colors[kind], lw=0)
            )
            overlay.text(x + _SQUARE + 0.05, y, kind, size=SMALL, color=SOFT, va="center")
            x += _key_width(kind)


def _unit(seconds: Sequence[float]) -> tuple[float, str]:
    """Factor and name of the time unit."""
    most = max(seconds)
    if most >= 1:
        return 1.0, "seconds"
    return (1e3, "milliseconds") if most >= 1e-3 else (1e6, "microseconds")


Part = Latency
