"""Score of policies against the bytes that they keep; EpiCache's figure 5 with intervals.

One panel per task, length and model. The x position is the number of bytes actually held, as a
share of the full cache's; bars are 95% bootstrap intervals over files. The full cache is a
horizontal line, as is a control with a single budget. Lines are shifted slightly so that their bars
do not overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from larder.evaluation import Interval
from larder_bench.plots import score_groups
from larder_bench.plots.figures.base import CountedBytes, Figure, PolicyStyles, drawing_name
from larder_bench.plots.line_panels import (
    Axis,
    Line,
    LinePanel,
    draw_panels,
    linear_axis,
    log2_axis,
)
from larder_bench.plots.policy_styles import CONTROLS, FULL, controls_last, styles_for
from larder_bench.plots.style import Drawing, figure_style
from larder_bench.results.rows import Results, Row

LINE_SHIFT = 0.018  # of a doubling of bytes, from one line to the next


@dataclass(frozen=True)
class QualityPoint:
    """Policy at one budget: its share of the full cache's bytes, and its score."""

    share: float
    score: Interval


@dataclass(frozen=True)
class QualityChart:
    """Plotted numbers of one group of cells.

    Args:
        points: points by policy, the smallest share first.
        full: score of the full cache; None if it was not measured.
    """

    title: str
    score: str
    matched: str
    points: dict[str, tuple[QualityPoint, ...]]
    full: Interval | None
    files: int
    items: int


@dataclass(frozen=True)
class Quality(Figure):
    """Quality against bytes.

    Args:
        score: exact, f1, f1_stemmed, log_likelihood, kl, same, mass, or another that items have;
            empty for one drawing per main score (`score_groups.MAIN`).
        kind: kind of the questions that count; empty for all.
        bytes: `active`, `held` or `peak`.
    """

    score: str = ""
    kind: str = ""
    bytes: CountedBytes = CountedBytes.ACTIVE

    def draw(self, results: Results, styles: PolicyStyles) -> list[Drawing]:
        charts = self.charts(results, styles)
        if not charts:
            wrong = self.score and score_groups.missing_score_error(
                "quality", self.score, results.measured
            )
            raise wrong or self.nothing("scored cells")
        return [
            Drawing(
                drawing_name("quality", index, len(charts)),
                _drawing_title(group[0].score, label),
                self._caption(group, styles),
                self._figure(group, styles),
            )
            for index, (label, group) in enumerate(charts)
        ]

    def charts(
        self, results: Results, styles: PolicyStyles
    ) -> list[tuple[str, list[QualityChart]]]:
        """Plotted numbers: one figure per study, model, measure and score."""
        cells = [row for row in results.measured if row["policy"] in styles and row.get("items")]
        charts: list[tuple[str, list[QualityChart]]] = []
        for label, rows in score_groups.comparable_sheets(cells).items():
            groups = score_groups.group_cells(rows)
            titles = score_groups.group_titles(list(groups))
            for score in [self.score] if self.score else score_groups.main_scores(rows):
                group = [self._chart(titles[key], score, cells) for key, cells in groups.items()]
                if any(chart.items for chart in group):
                    charts.append((label, [chart for chart in group if chart.items]))
        return charts

    def _figure(self, charts: Sequence[QualityChart], styles: PolicyStyles) -> object:
        order = {policy: styles[policy] for policy in controls_last(list(styles))}
        with figure_style():
            labeled = [
                name for name, style in self._styles(charts, order).items() if style.is_labeled
            ]
            panels = [_panel(chart, list(order), labeled) for chart in charts]
            shares = [x for panel in panels for line in panel.lines for x in line.xs]
            shares = shares or [
                p.share for chart in charts for ps in chart.points.values() for p in ps
            ]
            x = log2_axis("bytes, share of the full cache", shares or [1.0], _fraction)
            return draw_panels(panels, order, x, _height(charts))

    def _chart(self, title: str, score: str, rows: Sequence[Row]) -> QualityChart:
        points: dict[str, list[QualityPoint]] = {}
        counts = [(0, 0)]
        for (policy, _), cells in score_groups.by_policy_and_budget(rows).items():
            if not (files := score_groups.scores_by_seed(cells, score, self.kind)):
                continue
            shares = [cells[seed][self.bytes.key] / cells[seed]["full_kv_bytes"] for seed in files]
            point = QualityPoint(float(np.mean(shares)), score_groups.mean_interval(files))
            points.setdefault(policy, []).append(point)
            counts.append((len(files), sum(map(len, files.values()))))
        full = points.pop(FULL, None)
        ordered = {policy: tuple(sorted(each, key=_share)) for policy, each in points.items()}
        best, matched = full[0].score if full else None, rows[0]["matched"]
        num_files, num_items = max(counts)
        return QualityChart(title, score, matched, ordered, best, num_files, num_items)

    def _styles(self, charts: Sequence[QualityChart], styles: PolicyStyles) -> PolicyStyles:
        return styles_for(styles, {policy for chart in charts for policy in chart.points})

    def _caption(self, charts: Sequence[QualityChart], styles: PolicyStyles) -> str:
        quantity = score_groups.score_title(charts[0].score) + (
            f" of {self.kind} questions" if self.kind else ""
        )
        pale = sum(not style.is_labeled for style in self._styles(charts, styles).values())
        counts = [
            score_groups.count_noun(s.files, "file")
            + ", "
            + score_groups.count_noun(s.items, "item")
            for s in charts
        ]
        summary = "; ".join(f"{s.title}: {count}" for s, count in zip(charts, counts, strict=True))
        return (
            f"{score_groups.capitalize(quantity)} against the bytes of the cache "
            f"({self.bytes.value}), as "
            "a share of the full cache's. Bars are 95% bootstrap intervals over files; lines are "
            "shifted slightly so that bars do not overlap. Budgets are equal in "
            f"{score_groups.matched_title(charts[0].matched)}."
            + (" A horizontal gray line is a control." if _has_level(charts) else "")
            + (f" {pale} more policies are drawn pale and without a label." if pale else "")
            + f" {summary}."
        )


def _panel(chart: QualityChart, order: Sequence[str], labeled: Collection[str]) -> LinePanel:
    single = _single_budget_controls(chart)
    curves = [policy for policy in order if policy in chart.points and policy not in single]
    shifted = [policy for policy in curves if policy in labeled]
    middle = (len(shifted) - 1) / 2
    shifts = {policy: 2 ** (LINE_SHIFT * (n - middle)) for n, policy in enumerate(shifted)}
    lines = [_line(policy, chart.points[policy], shifts.get(policy, 1.0)) for policy in curves]
    levels = ((FULL, chart.full.mean),) if chart.full else ()
    levels += tuple((policy, chart.points[policy][0].score.mean) for policy in single)
    return LinePanel(chart.title, tuple(lines), levels)


def _single_budget_controls(chart: QualityChart) -> list[str]:
    """Controls with a single budget."""
    return [name for name, points in chart.points.items() if name in CONTROLS and len(points) == 1]


def _has_level(charts: Sequence[QualityChart]) -> bool:
    return any(chart.full is not None or _single_budget_controls(chart) for chart in charts)


def _drawing_title(score: str, label: str) -> str:
    title = score_groups.capitalize(f"{score_groups.score_title(score)} against bytes")
    return f"{title}: {label}" if label else title


def _line(policy: str, points: Sequence[QualityPoint], shift: float) -> Line:
    return Line(
        policy,
        tuple(point.share * shift for point in points),
        tuple(point.score.mean for point in points),
        tuple(point.score.low for point in points),
        tuple(point.score.high for point in points),
    )


def _height(charts: Sequence[QualityChart]) -> Axis:
    """Common scale of all panels: from 0 if that is informative, up to 1 at most for shares."""
    score = charts[0].score
    intervals = [p.score for chart in charts for points in chart.points.values() for p in points]
    intervals += [chart.full for chart in charts if chart.full]
    low, high = min(i.low for i in intervals), max(i.high for i in intervals)
    margin = 0.05 * (high - low or 1.0)
    if score == "kl":
        return linear_axis(score_groups.score_title(score), 0.0, high + margin)
    if score not in score_groups.BOUNDED:
        return linear_axis(score_groups.score_title(score), low - margin, high + margin)
    # If nearly everything is kept, or predicted alike, policies differ only slightly.
    low = max(0.0, low - margin) if score in ("same", "mass") else 0.0
    return linear_axis(score_groups.score_title(score), low, min(1.02, high + margin))


def _share(point: QualityPoint) -> float:
    return point.share


def _fraction(power: int) -> str:
    return f"1/{2**-power}" if power < 0 else str(2**power)


Part = Quality
