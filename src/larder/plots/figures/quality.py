"""How well policies answer against the bytes that they keep; EpiCache's figure 5 with intervals.

A panel for each task, length and model. Points stand at the bytes that were really held, as a share
of the full cache's; bars are 95% bootstrap intervals over files. The full cache is the line across.
Lines are moved sideways by a hair, so that their bars do not cover each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from larder.bench.bootstrap import Interval
from larder.bench.rows import Results, Row
from larder.plots import scores
from larder.plots.figures.base import Bytes, Figure, Looks, numbered
from larder.plots.lines import Axis, Line, Panel, doublings, draw, even
from larder.plots.looks import FULL, controls_last, within
from larder.plots.style import Drawing, styled

HAIR = 0.018  # of a doubling of bytes, from one line to the next


@dataclass(frozen=True)
class Point:
    """A policy at one budget: its share of the full cache's bytes, and how it scored."""

    share: float
    score: Interval


@dataclass(frozen=True)
class Scored:
    """One group of cells, in numbers.

    Args:
        points: by policy, the smallest share first.
        full: how the full cache scored; None where it was not measured.
    """

    title: str
    points: dict[str, tuple[Point, ...]]
    full: Interval | None
    files: int
    items: int


@dataclass(frozen=True)
class Quality(Figure):
    """Quality against bytes.

    Args:
        score: exact, f1, f1_stemmed, log_likelihood, or another that items have.
        kind: of the questions that count; empty for all.
        bytes: `active`, `held` or `peak`.
    """

    score: str = "exact"
    kind: str = ""
    bytes: Bytes = Bytes.ACTIVE

    def draw(self, results: Results, looks: Looks) -> list[Drawing]:
        charts = self.charts(results, looks)
        if not charts:
            wrong = scores.lacking("quality", self.score, results.measured)
            raise wrong or self.nothing("scored cells")
        title = scores.sentence(f"{scores.score_title(self.score)} against bytes")
        return [
            Drawing(
                numbered("quality", number, len(charts)),
                f"{title}: {label}" if label else title,
                self._caption(found, looks),
                self._figure(found, looks),
            )
            for number, (label, found) in enumerate(charts)
        ]

    def charts(self, results: Results, looks: Looks) -> list[tuple[str, list[Scored]]]:
        """What is drawn, in numbers: a sheet for each study, model and way of measuring."""
        cells = [row for row in results.measured if row["policy"] in looks and row.get("items")]
        charts: list[tuple[str, list[Scored]]] = []
        for label, rows in scores.families(cells).items():
            groups = scores.grouped(rows)
            titles = scores.titles(list(groups))
            found = [self._scored(titles[group], own) for group, own in groups.items()]
            if any(scored.items for scored in found):
                charts.append((label, [scored for scored in found if scored.items]))
        return charts

    def _figure(self, found: Sequence[Scored], looks: Looks) -> object:
        order = {policy: looks[policy] for policy in controls_last(list(looks))}
        with styled():
            named = [name for name, look in self._shown(found, order).items() if look.is_told]
            panels = [_panel(scored, list(order), named) for scored in found]
            shares = [x for panel in panels for line in panel.lines for x in line.xs] or [1.0]
            x = doublings("bytes, share of the full cache", shares, _fraction)
            return draw(panels, order, x, _height(found, self.score))

    def _scored(self, title: str, rows: Sequence[Row]) -> Scored:
        points: dict[str, list[Point]] = {}
        counts = [(0, 0)]
        for (policy, _), found in scores.by_case(rows).items():
            if not (files := scores.scored(found, self.score, self.kind)):
                continue
            taken = [found[seed][self.bytes.key] / found[seed]["full_kv_bytes"] for seed in files]
            point = Point(float(np.mean(taken)), scores.interval(files))
            points.setdefault(policy, []).append(point)
            counts.append((len(files), sum(map(len, files.values()))))
        full = points.pop(FULL, None)
        ordered = {policy: tuple(sorted(own, key=_share)) for policy, own in points.items()}
        return Scored(title, ordered, full[0].score if full else None, *max(counts))

    def _shown(self, found: Sequence[Scored], looks: Looks) -> Looks:
        return within(looks, {policy for scored in found for policy in scored.points})

    def _caption(self, found: Sequence[Scored], looks: Looks) -> str:
        what = scores.score_title(self.score) + (f" of {self.kind} questions" if self.kind else "")
        pale = sum(not look.is_told for look in self._shown(found, looks).values())
        told = [
            scores.several(s.files, "file") + ", " + scores.several(s.items, "item") for s in found
        ]
        counted = "; ".join(f"{s.title}: {count}" for s, count in zip(found, told, strict=True))
        return (
            f"{scores.sentence(what)} against the bytes of the cache ({self.bytes.value}), as "
            "a share of the full cache's. Bars are 95% bootstrap intervals over files; lines are "
            "moved sideways by a hair, so that bars do not cover each other."
            + (f" {pale} more policies are drawn pale and not named." if pale else "")
            + f" {counted}."
        )


def _panel(scored: Scored, order: Sequence[str], named: Collection[str]) -> Panel:
    present = [policy for policy in order if policy in scored.points]
    told = [policy for policy in present if policy in named]
    middle = (len(told) - 1) / 2
    shifts = {policy: 2 ** (HAIR * (number - middle)) for number, policy in enumerate(told)}
    lines = [_line(p, scored.points[p], shifts.get(p, 1.0)) for p in present]
    across = ((FULL, scored.full.mean),) if scored.full else ()
    return Panel(scored.title, tuple(lines), across)


def _line(policy: str, points: Sequence[Point], shift: float) -> Line:
    return Line(
        policy,
        tuple(point.share * shift for point in points),
        tuple(point.score.mean for point in points),
        tuple(point.score.low for point in points),
        tuple(point.score.high for point in points),
    )


def _height(found: Sequence[Scored], score: str) -> Axis:
    """One scale for all panels: from 0 where scores lie between 0 and 1."""
    intervals = [p.score for s in found for points in s.points.values() for p in points]
    intervals += [scored.full for scored in found if scored.full]
    low, high = min(i.low for i in intervals), max(i.high for i in intervals)
    room = 0.05 * (high - low or 1.0)
    if score not in scores.BOUNDED:
        return even(scores.score_title(score), low - room, high + room)
    return even(scores.score_title(score), 0.0, min(1.02, high + room))


def _share(point: Point) -> float:
    return point.share


def _fraction(power: int) -> str:
    return f"1/{2**-power}" if power < 0 else str(2**power)


Part = Quality
