"""Change of each layer's keys under block-wise eviction; EpiCache's figures 4a and 9.

One line per kind of text; dots are means over texts, bars reach from the minimum to the maximum.
Layers with low values lose most when the past is masked, and get most of a sensitivity budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from larder_bench.plots import score_groups
from larder_bench.plots.figures.base import Figure, PolicyStyles, drawing_name
from larder_bench.plots.line_panels import Axis, Line, LinePanel, draw_panels, linear_axis
from larder_bench.plots.policy_styles import assign_styles as looks_of
from larder_bench.plots.style import Drawing, figure_style
from larder_bench.results.rows import Results, Row

SCORE = "similarity"
STEPS = (1, 2, 4, 5, 10, 20, 50)  # layers from tick to tick
MOST_TICKS = 8


@dataclass(frozen=True)
class SimilarityFigure(Figure):
    """Cosines of keys by layer."""

    def draw(self, results: Results, styles: PolicyStyles) -> list[Drawing]:
        charts = self.charts(results, styles)
        if not charts:
            raise self.nothing("cells of --measure similarity")
        caption = (
            "Mean cosine between a layer's keys with the whole context and with the context that "
            "block-wise eviction would leave. Dots are means over texts of a kind, bars reach from "
            "the minimum to the maximum."
        )
        return [
            Drawing(
                drawing_name("similarity", index, len(charts)),
                score_groups.join_words("Sensitivity of layers", label),
                caption,
                _figure(panel),
            )
            for index, (label, panel) in enumerate(charts)
        ]

    def charts(self, results: Results, styles: PolicyStyles) -> list[tuple[str, LinePanel]]:
        """Plotted numbers: one line per task and length."""
        rows = [row for row in results.measured if row["policy"] in styles]
        rows = [row for row in rows if score_groups.scores_by_seed({0: row}, SCORE)]
        return [
            (label, _panel(group)) for label, group in score_groups.comparable_sheets(rows).items()
        ]


def _panel(rows: Sequence[Row]) -> LinePanel:
    groups = score_groups.group_cells(rows)
    titles = score_groups.group_titles(list(groups))
    names = {group: titles[group].replace(" tokens", "") for group in groups}  # within a column
    return LinePanel("", tuple(_line(names[group], cells) for group, cells in groups.items()))


def _line(name: str, rows: Sequence[Row]) -> Line:
    layers = [item["question"] for item in rows[0]["items"]]
    values = np.array([[item[SCORE] for item in row["items"]] for row in rows])  # [N, L]
    ends = (values.mean(0), values.min(0), values.max(0)) if len(rows) > 1 else (values[0],)
    return Line(name, tuple(map(float, layers)), *(tuple(end.tolist()) for end in ends))


def _figure(panel: LinePanel) -> object:
    values = [y for line in panel.lines for y in (*line.ys, *line.lows, *line.highs)]
    margin = 0.05 * (max(values) - min(values) or 1.0)
    last = max(line.xs[-1] for line in panel.lines)
    step = next((step for step in STEPS if last / step < MOST_TICKS), STEPS[-1])
    ticks = tuple((float(n), str(n)) for n in range(0, int(last) + 1, step))
    with figure_style():
        x = Axis("layer", ticks, -0.02 * last, 1.02 * last)
        y = linear_axis("cosine of keys", min(values) - margin, min(1.0, max(values) + margin))
        return draw_panels([panel], looks_of(line.name for line in panel.lines), x, y)


Part = SimilarityFigure
