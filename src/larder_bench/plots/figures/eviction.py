"""Savings of eviction rules against the capacity of the tier.

A panel for each trace. A tier with all the bytes that a trace needs at its worst hour stands at 1.
`bound` is what no rule can pass, `clairvoyant` what one that knows the future comes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from larder_bench.plots import score_groups
from larder_bench.plots.figures.base import Figure, PolicyStyles, drawing_name
from larder_bench.plots.line_panels import Line, LinePanel, draw_panels, linear_axis, log2_axis
from larder_bench.plots.policy_styles import controls_last
from larder_bench.plots.style import Drawing, figure_style
from larder_bench.results.rows import Results, Row


class SavedQuantity(Enum):
    """Saved quantity: tokens not prefilled again, or the seconds that this would take."""

    TOKENS = "tokens"
    SECONDS = "seconds"


@dataclass(frozen=True)
class EvictionFigure(Figure):
    """Rules of eviction.

    Args:
        saved: `seconds` or `tokens`, as a share of what a tier without end would save.
    """

    saved: SavedQuantity = SavedQuantity.SECONDS

    def draw(self, results: Results, looks: PolicyStyles) -> list[Drawing]:
        charts = self.charts(results, looks)
        if not charts:
            raise self.nothing("rows of kind 'eviction'")
        caption = (
            f"{score_groups.capitalize(self.saved.value)} that a tier spares, as a share of what "
            "one "
            "without end would, against its bytes, as a share of those that the trace needs at "
            "its worst hour; means over seeds. No rule can pass the bound."
        )
        return [
            Drawing(
                drawing_name("eviction", number, len(charts)),
                score_groups.join_words("What rules of eviction save", label),
                caption,
                self._figure(panels, looks),
            )
            for number, (label, panels) in enumerate(charts)
        ]

    def charts(self, results: Results, looks: PolicyStyles) -> list[tuple[str, list[LinePanel]]]:
        """Plotted numbers: a sheet for each study and model, a panel for each trace."""
        rows = [row for row in results.shown("eviction") if row["policy"] in looks]
        rows = [row for row in rows if row[f"known_{self.saved.value}"]]  # anything to save
        return [
            (label, self._panels(own))
            for label, own in score_groups.comparable_sheets(rows).items()
        ]

    def _panels(self, rows: Sequence[Row]) -> list[LinePanel]:
        groups = score_groups.group_cells(rows)
        titles = score_groups.group_titles(list(groups))
        return [LinePanel(titles[group], self._lines(own)) for group, own in groups.items()]

    def _lines(self, rows: Sequence[Row]) -> tuple[Line, ...]:
        found: dict[str, dict[float, list[float]]] = {}
        for row in rows:
            share = row[f"hit_{self.saved.value}"] / row[f"known_{self.saved.value}"]
            found.setdefault(row["policy"], {}).setdefault(row["needed_share"], []).append(share)
        return tuple(
            Line(policy, tuple(sorted(own)), tuple(float(np.mean(own[x])) for x in sorted(own)))
            for policy, own in found.items()
        )

    def _figure(self, panels: Sequence[LinePanel], looks: PolicyStyles) -> object:
        lines = [line for panel in panels for line in panel.lines]
        order = {policy: looks[policy] for policy in controls_last(list(looks))}
        with figure_style():
            shares = [x for line in lines for x in line.xs]
            x = log2_axis("bytes, share of those needed", shares, _fraction)
            y = linear_axis(f"{self.saved.value} saved", 0.0, 1.02)
            return draw_panels(panels, order, x, y)


def _fraction(power: int) -> str:
    return f"1/{2**-power}" if power < 0 else str(2**power)


Part = EvictionFigure
