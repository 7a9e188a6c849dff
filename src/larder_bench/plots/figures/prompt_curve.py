"""Answers against how near the patched prompt is to the question: EpiCache's figure 2.

Each point is a prompt made of utterances around one percentile of their nearness to the question,
the nearest at the left. The question itself as the prompt is the line across.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from larder_bench.plots import score_groups
from larder_bench.plots.figures.base import Figure, PolicyStyles, drawing_name
from larder_bench.plots.line_panels import Axis, Line, LinePanel, draw_panels, linear_axis
from larder_bench.plots.policy_styles import COLORS, CONTROLS, MARKERS, SOLID, PolicyStyle
from larder_bench.plots.style import FAINT, SOFT, Drawing, figure_style
from larder_bench.results.rows import Results, Row

QUESTION = "the question"  # the line across


@dataclass(frozen=True)
class PromptCurve(Figure):
    """The patched-prompt curve.

    Args:
        score: exact, f1, f1_stemmed, log_likelihood, or another that items have.
    """

    score: str = "exact"

    def draw(self, results: Results, looks: PolicyStyles) -> list[Drawing]:
        charts = self.charts(results, looks)
        if not charts:
            wrong = score_groups.missing_score_error(
                "prompt_curve", self.score, results.shown("prompt")
            )
            raise wrong or self.nothing("rows of kind 'prompt' with a percentile")
        caption = (
            f"{score_groups.capitalize(score_groups.score_title(self.score))} where blocks are "
            "judged by a "
            "prompt of utterances at one rank of nearness to the question, as a percentile: the "
            "nearest at the left. The line across is the question itself as the prompt. Bars are "
            "95% bootstrap intervals over files."
        )
        return [
            Drawing(
                drawing_name("prompt_curve", number, len(charts)),
                score_groups.join_words("Patched prompts", label),
                caption,
                self._figure(panels, looks),
            )
            for number, (label, panels) in enumerate(charts)
        ]

    def charts(self, results: Results, looks: PolicyStyles) -> list[tuple[str, list[LinePanel]]]:
        """Plotted numbers: a panel per task and budget."""
        rows = [row for row in results.shown("prompt") if row["policy"] in looks]
        rows = [row for row in rows if score_groups.scores_by_seed({0: row}, self.score)]
        charts = [
            (label, self._panels(own))
            for label, own in score_groups.comparable_sheets(rows).items()
        ]
        return [(label, panels) for label, panels in charts if panels]

    def _panels(self, rows: Sequence[Row]) -> list[LinePanel]:
        """Policies with a scoring prompt other than the question."""
        groups = score_groups.group_cells(rows)
        titles = score_groups.group_titles(list(groups))
        return [
            self._panel(f"{titles[group]}, budget {budget}", own)
            for group, found in groups.items()
            for budget in dict.fromkeys(row["budget"] for row in found)
            if any(r["percentile"] is not None for r in found if r["budget"] == budget)
            and (own := [row for row in found if row["budget"] == budget])
        ]

    def _figure(self, panels: Sequence[LinePanel], looks: PolicyStyles) -> object:
        own = {line.name for panel in panels for line in panel.lines}
        order = {p: _as_curve(look) if p in own else look for p, look in looks.items()}
        order[QUESTION] = PolicyStyle("question itself", FAINT, SOFT, "", CONTROLS["oracle"])
        with figure_style():
            x = Axis("nearness rank of the prompt's utterances", _RANKS, 0.0, 100.0)
            return draw_panels(panels, order, x, _height(panels, self.score))

    def _panel(self, title: str, rows: Sequence[Row]) -> LinePanel:
        policies = dict.fromkeys(r["policy"] for r in rows if r["percentile"] is not None)
        own = {p: [row for row in rows if row["policy"] == p] for p in policies}
        asked = [row for row in rows if row["percentile"] is None]
        across = ((QUESTION, self._score(asked).mean),) if asked else ()
        return LinePanel(title, tuple(self._line(p, own[p]) for p in policies), across)

    def _line(self, policy: str, rows: Sequence[Row]) -> Line:
        ranks = sorted({row["percentile"] for row in rows} - {None})
        found = [self._score([r for r in rows if r["percentile"] == rank]) for rank in ranks]
        return Line(
            policy,
            tuple(float(rank) for rank in ranks),
            tuple(interval.mean for interval in found),
            tuple(interval.low for interval in found),
            tuple(interval.high for interval in found),
        )

    def _score(self, rows: Sequence[Row]) -> score_groups.Interval:
        by_seed = {row["seed"]: row for row in rows}
        return score_groups.mean_interval(score_groups.scores_by_seed(by_seed, self.score))


_RANKS = ((0.0, "nearest"), (25.0, "25%"), (50.0, "50%"), (75.0, "75%"), (100.0, "farthest"))


def _as_curve(look: PolicyStyle) -> PolicyStyle:
    """A control that is a curve here, and not what curves are compared with."""
    if not look.is_control:
        return look
    return PolicyStyle("utterances", *COLORS[0], MARKERS[0], SOLID)


def _height(panels: Sequence[LinePanel], score: str) -> Axis:
    ends = [y for panel in panels for line in panel.lines for y in (*line.lows, *line.highs)]
    ends += [level for panel in panels for _, level in panel.levels]
    low, high = min(ends), max(ends)
    room = 0.08 * (high - low or 1.0)
    if score in score_groups.BOUNDED:
        low, high = max(0.0, low - room), min(1.02, high + room)
        return linear_axis(score_groups.score_title(score), low, high)
    return linear_axis(score_groups.score_title(score), low - room, high + room)


Part = PromptCurve
