"""What rules of eviction save, against the bytes of the tier.

A panel for each trace. A tier with all the bytes that a trace needs at its worst hour stands at 1.
`bound` is what no rule can pass, `clairvoyant` what one that knows the future comes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from larder.bench.rows import Results, Row
from larder.plots import scores
from larder.plots.figures.base import Figure, Looks, numbered
from larder.plots.lines import Line, Panel, doublings, draw, even
from larder.plots.looks import controls_last
from larder.plots.style import Drawing, styled


class Saved(Enum):
    """What is spared: tokens that need not be read anew, or the seconds that this would take."""

    TOKENS = "tokens"
    SECONDS = "seconds"


@dataclass(frozen=True)
class Eviction(Figure):
    """Rules of eviction.

    Args:
        saved: `seconds` or `tokens`, as a share of what a tier without end would save.
    """

    saved: Saved = Saved.SECONDS

    def draw(self, results: Results, looks: Looks) -> list[Drawing]:
        charts = self.charts(results, looks)
        if not charts:
            raise self.nothing("rows of kind 'eviction'")
        caption = (
            f"{scores.sentence(self.saved.value)} that a tier spares, as a share of what one "
            "without end would, against its bytes, as a share of those that the trace needs at "
            "its worst hour; means over seeds. No rule can pass the bound."
        )
        return [
            Drawing(
                numbered("eviction", number, len(charts)),
                scores.joined("What rules of eviction save", label),
                caption,
                self._figure(panels, looks),
            )
            for number, (label, panels) in enumerate(charts)
        ]

    def charts(self, results: Results, looks: Looks) -> list[tuple[str, list[Panel]]]:
        """What is drawn, in numbers: a sheet for each study and model, a panel for each trace."""
        rows = [row for row in results.shown("eviction") if row["policy"] in looks]
        rows = [row for row in rows if row[f"known_{self.saved.value}"]]  # anything to save
        return [(label, self._panels(own)) for label, own in scores.families(rows).items()]

    def _panels(self, rows: Sequence[Row]) -> list[Panel]:
        groups = scores.grouped(rows)
        titles = scores.titles(list(groups))
        return [Panel(titles[group], self._lines(own)) for group, own in groups.items()]

    def _lines(self, rows: Sequence[Row]) -> tuple[Line, ...]:
        found: dict[str, dict[float, list[float]]] = {}
        for row in rows:
            share = row[f"hit_{self.saved.value}"] / row[f"known_{self.saved.value}"]
            found.setdefault(row["policy"], {}).setdefault(row["needed_share"], []).append(share)
        return tuple(
            Line(policy, tuple(sorted(own)), tuple(float(np.mean(own[x])) for x in sorted(own)))
            for policy, own in found.items()
        )

    def _figure(self, panels: Sequence[Panel], looks: Looks) -> object:
        lines = [line for panel in panels for line in panel.lines]
        order = {policy: looks[policy] for policy in controls_last(list(looks))}
        with styled():
            shares = [x for line in lines for x in line.xs]
            x = doublings("bytes, share of those needed", shares, _fraction)
            y = even(f"{self.saved.value} saved", 0.0, 1.02)
            return draw(panels, order, x, y)


def _fraction(power: int) -> str:
    return f"1/{2**-power}" if power < 0 else str(2**power)


Part = Eviction
