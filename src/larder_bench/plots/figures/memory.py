"""Peak and resident bytes of prefill against input length; EpiCache's figure 1c (top).

One panel per task and budget; two if a slow tier holds anything: the fast tier, and both. The
dashed line is the full cache: a policy below it saves memory, one at the same level has to hold
everything first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from larder_bench.plots import score_groups
from larder_bench.plots.figures.base import CountedBytes, Figure, PolicyStyles, drawing_name
from larder_bench.plots.line_panels import Line, LinePanel, draw_panels, log2_axis
from larder_bench.plots.policy_styles import CONTROLS, FULL, PolicyStyle, controls_last
from larder_bench.plots.style import FAINT, SOFT, Drawing, figure_style
from larder_bench.results.budget_labels import sort_budgets
from larder_bench.results.rows import Results, Row

_TITLES = {
    CountedBytes.ACTIVE: "bytes that a question attends to",
    CountedBytes.HELD: "bytes held after reading",
    CountedBytes.PEAK: "peak bytes while reading",
}
_FAST = ", fast tier"


@dataclass(frozen=True)
class MemoryFigure(Figure):
    """Memory against length.

    Args:
        bytes: `active`, `held` or `peak`.
    """

    bytes: CountedBytes = CountedBytes.PEAK

    def draw(self, results: Results, styles: PolicyStyles) -> list[Drawing]:
        charts = self.charts(results, styles)
        if not charts:
            raise self.nothing("cells of the same task at two lengths or more")
        caption = (
            f"{score_groups.capitalize(_TITLES[self.bytes])}, of keys, values and all other "
            "tensors of the cache, against the tokens read; means over files. The dashed line is "
            "a full cache."
        )
        return [
            Drawing(
                drawing_name("memory", index, len(charts)),
                score_groups.join_words("Memory against length", label),
                caption,
                self._figure(panels, styles),
            )
            for index, (label, panels) in enumerate(charts)
        ]

    def charts(self, results: Results, styles: PolicyStyles) -> list[tuple[str, list[LinePanel]]]:
        """Plotted numbers: one figure per study and model, one panel per budget."""
        cells = [row | {"measure": ""} for row in results.measured if row["policy"] in styles]
        charts = [
            (label, self._panels(rows, styles))
            for label, rows in score_groups.comparable_sheets(cells).items()
        ]
        return [(label, panels) for label, panels in charts if panels]

    def _panels(self, cells: Sequence[Row], styles: PolicyStyles) -> list[LinePanel]:
        panels: list[LinePanel] = []
        groups = score_groups.group_cells(cells, "tokens")
        titles = score_groups.group_titles(list(groups))
        for group, rows in groups.items():
            others = [row for row in rows if row["policy"] != FULL]
            for budget in sort_budgets(list(dict.fromkeys(row["budget"] for row in others))):
                selected = [row for row in others if row["budget"] == budget]
                if len({row["tokens"] for row in selected}) < 2:
                    continue
                full = _line(FULL, [row | {"policy": FULL} for row in rows], "full_kv_bytes")
                for tier, key in self._tiers(selected):
                    lines = [line for policy in styles if (line := _line(policy, selected, key)).xs]
                    title = f"{titles[group]}, budget {budget}{tier}"
                    panels.append(LinePanel(title, (*lines, full)))
        return panels

    def _tiers(self, rows: Sequence[Row]) -> list[tuple[str, str]]:
        """Quantities of panels: the device tier separately if the host tier holds anything."""
        if not any(row.get("slow_kv_bytes") for row in rows):
            return [("", self.bytes.key)]
        return [(_FAST, CountedBytes.ACTIVE.key), (", both tiers", self.bytes.key)]

    def _figure(self, panels: Sequence[LinePanel], styles: PolicyStyles) -> object:
        order: dict[str, PolicyStyle] = {
            policy: styles[policy] for policy in controls_last(list(styles))
        }
        order[FULL] = PolicyStyle("full cache", FAINT, SOFT, "", CONTROLS[FULL])
        lines = [line for panel in panels for line in panel.lines]
        with figure_style():
            x = log2_axis("tokens read", [x for line in lines for x in line.xs], _tokens)
            label = (
                "bytes" if any(_FAST in panel.title for panel in panels) else _TITLES[self.bytes]
            )
            y = log2_axis(label, [y for line in lines for y in line.ys], format_power_of_two)
            return draw_panels(panels, order, x, y)


def _line(policy: str, rows: Sequence[Row], key: str) -> Line:
    points = [(r["tokens"], r["context_tokens"], r[key]) for r in rows if r["policy"] == policy]
    frame = pl.DataFrame(points, ["tokens", "x", "y"], orient="row")
    means = frame.group_by("tokens").mean().sort("tokens")
    return Line(policy, tuple(means["x"]), tuple(means["y"]))


def format_power_of_two(power: int) -> str:
    """Power of two bytes in a readable unit."""
    unit = max(0, min(4, power // 10))
    return f"{2 ** (power - 10 * unit)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def _tokens(power: int) -> str:
    return f"{2 ** (power - 10)}K" if power >= 10 else str(2**power)


Part = MemoryFigure
