"""Savings of eviction policies against the capacity of the tier.

One panel per trace. Capacity 1 holds all bytes that a trace needs at its peak. `bound` is an upper
bound for every policy, `clairvoyant` a policy that knows the future.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from larder_bench.plots import score_groups
from larder_bench.plots.figures.base import Figure, PolicyStyles, drawing_name
from larder_bench.plots.line_panels import (
    Line,
    LinePanel,
    draw_panels,
    linear_axis,
    log2_axis,
    mean_lines,
)
from larder_bench.plots.policy_styles import controls_last
from larder_bench.plots.style import Drawing, figure_style
from larder_bench.results.rows import Results, Row


class SavedQuantity(Enum):
    """Saved quantity: tokens not prefilled again, or the seconds that this would take."""

    TOKENS = "tokens"
    SECONDS = "seconds"


@dataclass(frozen=True)
class EvictionFigure(Figure):
    """Savings of eviction policies.

    Args:
        saved: `seconds` or `tokens`, as a share of the savings of an unlimited tier.
    """

    saved: SavedQuantity = SavedQuantity.SECONDS

    def draw(self, results: Results, styles: PolicyStyles) -> list[Drawing]:
        charts = self.charts(results, styles)
        if not charts:
            raise self.nothing("rows of kind 'eviction'")
        caption = (
            f"{score_groups.capitalize(self.saved.value)} that a tier saves, as a share of the "
            "savings of an unlimited tier, against its bytes, as a share of those that the trace "
            "needs at its peak; means over seeds. No policy can exceed the bound."
        )
        return [
            Drawing(
                drawing_name("eviction", index, len(charts)),
                score_groups.join_words("Savings of eviction policies", label),
                caption,
                self._figure(panels, styles),
            )
            for index, (label, panels) in enumerate(charts)
        ]

    def charts(self, results: Results, styles: PolicyStyles) -> list[tuple[str, list[LinePanel]]]:
        """Plotted numbers: one figure per study and model, one panel per trace."""
        rows = [row for row in results.exhibits_of("eviction") if row["policy"] in styles]
        rows = [row for row in rows if row[f"known_{self.saved.value}"]]  # anything to save
        return [
            (label, self._panels(group))
            for label, group in score_groups.comparable_sheets(rows).items()
        ]

    def _panels(self, rows: Sequence[Row]) -> list[LinePanel]:
        groups = score_groups.group_cells(rows)
        titles = score_groups.group_titles(list(groups))
        return [LinePanel(titles[group], self._lines(cells)) for group, cells in groups.items()]

    def _lines(self, rows: Sequence[Row]) -> tuple[Line, ...]:
        hit, known = f"hit_{self.saved.value}", f"known_{self.saved.value}"
        return mean_lines((r["policy"], r["needed_share"], r[hit] / r[known]) for r in rows)

    def _figure(self, panels: Sequence[LinePanel], styles: PolicyStyles) -> object:
        lines = [line for panel in panels for line in panel.lines]
        order = {policy: styles[policy] for policy in controls_last(list(styles))}
        with figure_style():
            shares = [x for line in lines for x in line.xs]
            x = log2_axis("bytes, share of those needed", shares, _fraction)
            y = linear_axis(f"{self.saved.value} saved", 0.0, 1.02)
            return draw_panels(panels, order, x, y)


def _fraction(power: int) -> str:
    return f"1/{2**-power}" if power < 0 else str(2**power)


Part = EvictionFigure
