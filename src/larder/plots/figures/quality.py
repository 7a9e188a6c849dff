"""How well policies answer against the bytes that they keep; EpiCache's figure 5 with intervals.

A panel for each task, length and model. Points stand at the bytes that were really held, as a share
of the full cache's; bars are 95% bootstrap intervals over files. The full cache is the line across,
and so is a control that has one budget only. Lines are moved sideways by a hair, so that their bars
do not cover each other.
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
from larder.plots.looks import CONTROLS, FULL, controls_last, within
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
    score: str
    matched: str
    points: dict[str, tuple[Point, ...]]
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
    bytes: Bytes = Bytes.ACTIVE

    def draw(self, results: Results, looks: Looks) -> list[Drawing]:
        charts = self.charts(results, looks)
        if not charts:
            wrong = self.score and scores.lacking("quality", self.score, results.measured)
            raise wrong or self.nothing("scored cells")
        return [
            Drawing(
                numbered("quality", number, len(charts)),
                _titled(found[0].score, label),
                self._caption(found, looks),
                self._figure(found, looks),
            )
            for number, (label, found) in enumerate(charts)
        ]

    def charts(self, results: Results, looks: Looks) -> list[tuple[str, list[Scored]]]:
        """What is drawn, in numbers: a sheet for each study, model, way of measuring and score."""
        cells = [row for row in results.measured if row["policy"] in looks and row.get("items")]
        charts: list[tuple[str, list[Scored]]] = []
        for label, rows in scores.families(cells).items():
            groups = scores.grouped(rows)
            titles = scores.titles(list(groups))
            for score in [self.score] if self.score else scores.main(rows):
                found = [self._scored(titles[one], score, own) for one, own in groups.items()]
                if any(scored.items for scored in found):
                    charts.append((label, [scored for scored in found if scored.items]))
        return charts

    def _figure(self, found: Sequence[Scored], looks: Looks) -> object:
        order = {policy: looks[policy] for policy in controls_last(list(looks))}
        with styled():
            named = [name for name, look in self._shown(found, order).items() if look.is_told]
            panels = [_panel(scored, list(order), named) for scored in found]
            shares = [x for panel in panels for line in panel.lines for x in line.xs]
            shares = shares or [p.share for s in found for own in s.points.values() for p in own]
            x = doublings("bytes, share of the full cache", shares or [1.0], _fraction)
            return draw(panels, order, x, _height(found))

    def _scored(self, title: str, score: str, rows: Sequence[Row]) -> Scored:
        points: dict[str, list[Point]] = {}
        counts = [(0, 0)]
        for (policy, _), found in scores.by_case(rows).items():
            if not (files := scores.scored(found, score, self.kind)):
                continue
            taken = [found[seed][self.bytes.key] / found[seed]["full_kv_bytes"] for seed in files]
            point = Point(float(np.mean(taken)), scores.interval(files))
            points.setdefault(policy, []).append(point)
            counts.append((len(files), sum(map(len, files.values()))))
        full = points.pop(FULL, None)
        ordered = {policy: tuple(sorted(own, key=_share)) for policy, own in points.items()}
        best, matched = full[0].score if full else None, rows[0]["matched"]
        return Scored(title, score, matched, ordered, best, *max(counts))

    def _shown(self, found: Sequence[Scored], looks: Looks) -> Looks:
        return within(looks, {policy for scored in found for policy in scored.points})

    def _caption(self, found: Sequence[Scored], looks: Looks) -> str:
        what = scores.score_title(found[0].score) + (
            f" of {self.kind} questions" if self.kind else ""
        )
        pale = sum(not look.is_told for look in self._shown(found, looks).values())
        told = [
            scores.several(s.files, "file") + ", " + scores.several(s.items, "item") for s in found
        ]
        counted = "; ".join(f"{s.title}: {count}" for s, count in zip(found, told, strict=True))
        return (
            f"{scores.sentence(what)} against the bytes of the cache ({self.bytes.value}), as "
            "a share of the full cache's. Bars are 95% bootstrap intervals over files; lines are "
            "moved sideways by a hair, so that bars do not cover each other. Budgets are equal in "
            f"{scores.equal(found[0].matched)}."
            + (" A gray line from side to side is a control." if _has_level(found) else "")
            + (f" {pale} more policies are drawn pale and not named." if pale else "")
            + f" {counted}."
        )


def _panel(scored: Scored, order: Sequence[str], named: Collection[str]) -> Panel:
    present = [policy for policy in order if policy in scored.points]
    told = [policy for policy in present if policy in named]
    level = _level(scored)
    told = [policy for policy in told if policy not in level]
    middle = (len(told) - 1) / 2
    shifts = {policy: 2 ** (HAIR * (number - middle)) for number, policy in enumerate(told)}
    lines = [_line(p, scored.points[p], shifts.get(p, 1.0)) for p in present if p not in level]
    across = ((FULL, scored.full.mean),) if scored.full else ()
    across += tuple((policy, scored.points[policy][0].score.mean) for policy in level)
    return Panel(scored.title, tuple(lines), across)


def _level(scored: Scored) -> list[str]:
    """The controls that have one budget only."""
    return [name for name, own in scored.points.items() if name in CONTROLS and len(own) == 1]


def _has_level(found: Sequence[Scored]) -> bool:
    return any(scored.full is not None or _level(scored) for scored in found)


def _titled(score: str, label: str) -> str:
    title = scores.sentence(f"{scores.score_title(score)} against bytes")
    return f"{title}: {label}" if label else title


def _line(policy: str, points: Sequence[Point], shift: float) -> Line:
    return Line(
        policy,
        tuple(point.share * shift for point in points),
        tuple(point.score.mean for point in points),
        tuple(point.score.low for point in points),
        tuple(point.score.high for point in points),
    )


def _height(found: Sequence[Scored]) -> Axis:
    """One scale for all panels: from 0 where that tells something, no further than 1 for shares."""
    score = found[0].score
    intervals = [p.score for s in found for points in s.points.values() for p in points]
    intervals += [scored.full for scored in found if scored.full]
    low, high = min(i.low for i in intervals), max(i.high for i in intervals)
    room = 0.05 * (high - low or 1.0)
    if score == "kl":
        return even(scores.score_title(score), 0.0, high + room)
    if score not in scores.BOUNDED:
        return even(scores.score_title(score), low - room, high + room)
    # Where nearly everything is kept, or guessed alike, policies differ by a little.
    low = max(0.0, low - room) if score in ("same", "mass") else 0.0
    return even(scores.score_title(score), low, min(1.02, high + room))


def _share(point: Point) -> float:
    return point.share


def _fraction(power: int) -> str:
    return f"1/{2**-power}" if power < 0 else str(2**power)


Part = Quality
