"""Scores of answers by the similarity of the patched prompt to the question: EpiCache's figure 2.

Each point is a prompt of utterances around one percentile of their similarity to the question, the
most similar at the left. The horizontal line is the question itself as the prompt.
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

QUESTION = "the question"  # the horizontal line
_RANKS = ((0.0, "nearest"), (25.0, "25%"), (50.0, "50%"), (75.0, "75%"), (100.0, "farthest"))


@dataclass(frozen=True)
class PromptCurve(Figure):
    """Patched-prompt curve.

    Args:
        score: exact, f1, f1_stemmed, log_likelihood, or another that items have.
    """

    score: str = "exact"

    def draw(self, results: Results, styles: PolicyStyles) -> list[Drawing]:
        charts = self.charts(results, styles)
        if not charts:
            wrong = score_groups.missing_score_error(
                "prompt_curve", self.score, results.exhibits_of("prompt")
            )
            raise wrong or self.nothing("rows of kind 'prompt' with a percentile")
        caption = (
            f"{score_groups.capitalize(score_groups.score_title(self.score))} if blocks are "
            "scored by a prompt of utterances at one percentile of their similarity to the "
            "question: the nearest at the left. The horizontal line is the question itself as the "
            "prompt. Bars are 95% bootstrap intervals over files."
        )
        return [
            Drawing(
                drawing_name("prompt_curve", index, len(charts)),
                score_groups.join_words("Patched prompts", label),
                caption,
                self._figure(panels, styles),
            )
            for index, (label, panels) in enumerate(charts)
        ]

    def charts(self, results: Results, styles: PolicyStyles) -> list[tuple[str, list[LinePanel]]]:
        """Plotted numbers: one panel per task and budget."""
        rows = [row for row in results.exhibits_of("prompt") if row["policy"] in styles]
        rows = [row for row in rows if score_groups.scores_by_seed({0: row}, self.score)]
        charts = [
            (label, self._panels(group))
            for label, group in score_groups.comparable_sheets(rows).items()
        ]
        return [(label, panels) for label, panels in charts if panels]

    def _panels(self, rows: Sequence[Row]) -> list[LinePanel]:
        """Panels of policies with a scoring prompt other than the question."""
        groups = score_groups.group_cells(rows)
        titles = score_groups.group_titles(list(groups))
        return [
            self._panel(f"{titles[group]}, budget {budget}", selected)
            for group, cells in groups.items()
            for budget in dict.fromkeys(row["budget"] for row in cells)
            if any(r["percentile"] is not None for r in cells if r["budget"] == budget)
            and (selected := [row for row in cells if row["budget"] == budget])
        ]

    def _figure(self, panels: Sequence[LinePanel], styles: PolicyStyles) -> object:
        curves = {line.name for panel in panels for line in panel.lines}
        order = {p: _as_curve(style) if p in curves else style for p, style in styles.items()}
        order[QUESTION] = PolicyStyle("question itself", FAINT, SOFT, "", CONTROLS["oracle"])
        with figure_style():
            x = Axis("nearness rank of the prompt's utterances", _RANKS, 0.0, 100.0)
            return draw_panels(panels, order, x, _height(panels, self.score))

    def _panel(self, title: str, rows: Sequence[Row]) -> LinePanel:
        policies = dict.fromkeys(r["policy"] for r in rows if r["percentile"] is not None)
        by_policy = {p: [row for row in rows if row["policy"] == p] for p in policies}
        question = [row for row in rows if row["percentile"] is None]
        levels = ((QUESTION, self._score(question).mean),) if question else ()
        return LinePanel(title, tuple(self._line(p, by_policy[p]) for p in policies), levels)

    def _line(self, policy: str, rows: Sequence[Row]) -> Line:
        ranks = sorted({row["percentile"] for row in rows} - {None})
        intervals = [self._score([r for r in rows if r["percentile"] == rank]) for rank in ranks]
        return Line(
            policy,
            tuple(float(rank) for rank in ranks),
            tuple(interval.mean for interval in intervals),
            tuple(interval.low for interval in intervals),
            tuple(interval.high for interval in intervals),
        )

    def _score(self, rows: Sequence[Row]) -> score_groups.Interval:
        by_seed = {row["seed"]: row for row in rows}
        return score_groups.mean_interval(score_groups.scores_by_seed(by_seed, self.score))


def _as_curve(style: PolicyStyle) -> PolicyStyle:
    """Style of a control that is a curve here instead of a reference."""
    if not style.is_control:
        return style
    return PolicyStyle("utterances", *COLORS[0], MARKERS[0], SOLID)


def _height(panels: Sequence[LinePanel], score: str) -> Axis:
    ends = [y for panel in panels for line in panel.lines for y in (*line.lows, *line.highs)]
    ends += [level for panel in panels for _, level in panel.levels]
    low, high = min(ends), max(ends)
    margin = 0.08 * (high - low or 1.0)
    if score in score_groups.BOUNDED:
        low, high = max(0.0, low - margin), min(1.02, high + margin)
        return linear_axis(score_groups.score_title(score), low, high)
    return linear_axis(score_groups.score_title(score), low - margin, high + margin)


Part = PromptCurve
