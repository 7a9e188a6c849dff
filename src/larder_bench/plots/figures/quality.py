"""Score of policies against the bytes that they keep; EpiCache's figure 5 with intervals.

A panel for each task, length and model. Points stand at the bytes that were really held, as a share
of the full cache's; bars are 95% bootstrap intervals over files. The full cache is the line across,
and so is a control that has one budget only. Lines are moved sideways by a hair, so that their bars
do not cover each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from larder.evaluation.bootstrap import Interval
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
    """A policy at one budget: its share of the full cache's bytes, and how it scored."""

    share: float
    score: Interval


@dataclass(frozen=True)
class QualityChart:
    """One group of cells, in numbers.

    Args:
        points: by policy, the smallest share first.
        full: how the full cache scored; None where it was not measured.
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
            empty for a drawing of each that tells most of what was measured (`scores.MAIN`).
        kind: of the questions that count; empty for all.
        bytes: `active`, `held` or `peak`.
    """

    score: str = ""
    kind: str = ""
    bytes: CountedBytes = CountedBytes.ACTIVE

    def draw(self, results: Results, looks: PolicyStyles) -> list[Drawing]:
        charts = self.charts(results, looks)
        if not charts:
            wrong = self.score and score_groups.missing_score_error(
                "quality", self.score, results.measured
            )
            raise wrong or self.nothing("scored cells")
        return [
            Drawing(
                drawing_name("quality", number, len(charts)),
                _drawing_title(found[0].score, label),
                self._caption(found, looks),
                self._figure(found, looks),
            )
            for number, (label, found) in enumerate(charts)
        ]

    def charts(self, results: Results, looks: PolicyStyles) -> list[tuple[str, list[QualityChart]]]:
        """Plotted numbers: a sheet for each study, model, measure and score."""
        cells = [row for row in results.measured if row["policy"] in looks and row.get("items")]
        charts: list[tuple[str, list[QualityChart]]] = []
        for label, rows in score_groups.comparable_sheets(cells).items():
            groups = score_groups.group_cells(rows)
            titles = score_groups.group_titles(list(groups))
            for score in [self.score] if self.score else score_groups.main_scores(rows):
                found = [self._scored(titles[one], score, own) for one, own in groups.items()]
                if any(scored.items for scored in found):
                    charts.append((label, [scored for scored in found if scored.items]))
        return charts

    def _figure(self, found: Sequence[QualityChart], looks: PolicyStyles) -> object:
        order = {policy: looks[policy] for policy in controls_last(list(looks))}
        with figure_style():
            named = [name for name, look in self._shown(found, order).items() if look.is_labeled]
            panels = [_panel(scored, list(order), named) for scored in found]
            shares = [x for panel in panels for line in panel.lines for x in line.xs]
            shares = shares or [p.share for s in found for own in s.points.values() for p in own]
            x = log2_axis("bytes, share of the full cache", shares or [1.0], _fraction)
            return draw_panels(panels, order, x, _height(found))

    def _scored(self, title: str, score: str, rows: Sequence[Row]) -> QualityChart:
        points: dict[str, list[QualityPoint]] = {}
        counts = [(0, 0)]
        for (policy, _), found in score_groups.by_policy_and_budget(rows).items():
            if not (files := score_groups.scores_by_seed(found, score, self.kind)):
                continue
            taken = [found[seed][self.bytes.key] / found[seed]["full_kv_bytes"] for seed in files]
            point = QualityPoint(float(np.mean(taken)), score_groups.mean_interval(files))
            points.setdefault(policy, []).append(point)
            counts.append((len(files), sum(map(len, files.values()))))
        full = points.pop(FULL, None)
        ordered = {policy: tuple(sorted(own, key=_share)) for policy, own in points.items()}
        best, matched = full[0].score if full else None, rows[0]["matched"]
        return QualityChart(title, score, matched, ordered, best, *max(counts))

    def _shown(self, found: Sequence[QualityChart], looks: PolicyStyles) -> PolicyStyles:
        return styles_for(looks, {policy for scored in found for policy in scored.points})

    def _caption(self, found: Sequence[QualityChart], looks: PolicyStyles) -> str:
        what = score_groups.score_title(found[0].score) + (
            f" of {self.kind} questions" if self.kind else ""
        )
        pale = sum(not look.is_labeled for look in self._shown(found, looks).values())
        told = [
            score_groups.count_noun(s.files, "file")
            + ", "
            + score_groups.count_noun(s.items, "item")
            for s in found
        ]
        counted = "; ".join(f"{s.title}: {count}" for s, count in zip(found, told, strict=True))
        return (
            f"{score_groups.capitalize(what)} against the bytes of the cache "
            f"({self.bytes.value}), as "
            "a share of the full cache's. Bars are 95% bootstrap intervals over files; lines are "
            "moved sideways by a hair, so that bars do not cover each other. Budgets are equal in "
            f"{score_groups.matched_title(found[0].matched)}."
            + (" A gray line from side to side is a control." if _has_level(found) else "")
            + (f" {pale} more policies are drawn pale and not named." if pale else "")
            + f" {counted}."
        )


def _panel(scored: QualityChart, order: Sequence[str], named: Collection[str]) -> LinePanel:
    present = [policy for policy in order if policy in scored.points]
    told = [policy for policy in present if policy in named]
    level = _level(scored)
    told = [policy for policy in told if policy not in level]
    middle = (len(told) - 1) / 2
    shifts = {policy: 2 ** (LINE_SHIFT * (number - middle)) for number, policy in enumerate(told)}
    lines = [_line(p, scored.points[p], shifts.get(p, 1.0)) for p in present if p not in level]
    across = ((FULL, scored.full.mean),) if scored.full else ()
    across += tuple((policy, scored.points[policy][0].score.mean) for policy in level)
    return LinePanel(scored.title, tuple(lines), across)


def _level(scored: QualityChart) -> list[str]:
    """The controls that have one budget only."""
    return [name for name, own in scored.points.items() if name in CONTROLS and len(own) == 1]


def _has_level(found: Sequence[QualityChart]) -> bool:
    return any(scored.full is not None or _level(scored) for scored in found)


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


def _height(found: Sequence[QualityChart]) -> Axis:
    """One scale for all panels: from 0 where that tells something, no further than 1 for shares."""
    score = found[0].score
    intervals = [p.score for s in found for points in s.points.values() for p in points]
    intervals += [scored.full for scored in found if scored.full]
    low, high = min(i.low for i in intervals), max(i.high for i in intervals)
    room = 0.05 * (high - low or 1.0)
    if score == "kl":
        return linear_axis(score_groups.score_title(score), 0.0, high + room)
    if score not in score_groups.BOUNDED:
        return linear_axis(score_groups.score_title(score), low - room, high + room)
    # Where nearly everything is kept, or guessed alike, policies differ by a little.
    low = max(0.0, low - room) if score in ("same", "mass") else 0.0
    return linear_axis(score_groups.score_title(score), low, min(1.02, high + room))


def _share(point: QualityPoint) -> float:
    return point.share


def _fraction(power: int) -> str:
    return f"1/{2**-power}" if power < 0 else str(2**power)


Part = Quality
