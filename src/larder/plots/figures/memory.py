"""How many bytes reading takes, or leaves, as inputs get longer; EpiCache's figure 1c (top).

A panel for each task and budget; two where a slow tier holds anything: the fast one, and both. The
full cache's own bytes are the dashed line: a policy under it saves memory, one that runs level with
it has to hold everything first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from larder.bench.amounts import by_size
from larder.bench.rows import Results, Row
from larder.plots import scores
from larder.plots.figures.base import Bytes, Figure, Looks, numbered
from larder.plots.lines import Line, Panel, doublings, draw
from larder.plots.looks import CONTROLS, FULL, Look, controls_last
from larder.plots.style import FAINT, SOFT, Drawing, styled

_TITLES = {
    Bytes.ACTIVE: "bytes that a question attends to",
    Bytes.HELD: "bytes held after reading",
    Bytes.PEAK: "peak bytes while reading",
}
_FAST = ", fast tier"


@dataclass(frozen=True)
class Memory(Figure):
    """Memory against length.

    Args:
        bytes: `active`, `held` or `peak`.
    """

    bytes: Bytes = Bytes.PEAK

    def draw(self, results: Results, looks: Looks) -> list[Drawing]:
        charts = self.charts(results, looks)
        if not charts:
            raise self.nothing("cells of the same task at two lengths or more")
        caption = (
            f"{scores.sentence(_TITLES[self.bytes])}, keys and values with all that goes with "
            "them, against the tokens read; means over files. The dashed line is a full cache."
        )
        return [
            Drawing(
                numbered("memory", number, len(charts)),
                scores.joined("Memory against length", label),
                caption,
                self._figure(panels, looks),
            )
            for number, (label, panels) in enumerate(charts)
        ]

    def charts(self, results: Results, looks: Looks) -> list[tuple[str, list[Panel]]]:
        """What is drawn, in numbers: a sheet for each study and model, a panel for each budget."""
        cells = [row | {"measure": ""} for row in results.measured if row["policy"] in looks]
        charts = [
            (label, self._panels(rows, looks)) for label, rows in scores.families(cells).items()
        ]
        return [(label, panels) for label, panels in charts if panels]

    def _panels(self, cells: Sequence[Row], looks: Looks) -> list[Panel]:
        found: list[Panel] = []
        groups = scores.grouped(cells, "tokens")
        titles = scores.titles(list(groups))
        for group, rows in groups.items():
            others = [row for row in rows if row["policy"] != FULL]
            for budget in by_size(list(dict.fromkeys(row["budget"] for row in others))):
                own = [row for row in others if row["budget"] == budget]
                if len({row["tokens"] for row in own}) < 2:
                    continue
                full = _line(FULL, [row | {"policy": FULL} for row in rows], "full_kv_bytes")
                for tier, key in self._tiers(own):
                    lines = [line for policy in looks if (line := _line(policy, own, key)).xs]
                    title = f"{titles[group]}, budget {budget}{tier}"
                    found.append(Panel(title, (*lines, full)))
        return found

    def _tiers(self, rows: Sequence[Row]) -> list[tuple[str, str]]:
        """What panels show: the fast tier by itself where a slow one holds anything."""
        if not any(row.get("slow_kv_bytes") for row in rows):
            return [("", self.bytes.key)]
        return [(_FAST, Bytes.ACTIVE.key), (", both tiers", self.bytes.key)]

    def _figure(self, panels: Sequence[Panel], looks: Looks) -> object:
        order: dict[str, Look] = {policy: looks[policy] for policy in controls_last(list(looks))}
        order[FULL] = Look("full cache", FAINT, SOFT, "", CONTROLS[FULL])
        lines = [line for panel in panels for line in panel.lines]
        with styled():
            x = doublings("tokens read", [x for line in lines for x in line.xs], _tokens)
            label = (
                "bytes" if any(_FAST in panel.title for panel in panels) else _TITLES[self.bytes]
            )
            y = doublings(label, [y for line in lines for y in line.ys], size)
            return draw(panels, order, x, y)


def _line(policy: str, rows: Sequence[Row], key: str) -> Line:
    by_length: dict[int, list[Row]] = {}
    for row in rows:
        if row["policy"] == policy:
            by_length.setdefault(row["tokens"], []).append(row)
    ordered = [by_length[tokens] for tokens in sorted(by_length)]
    return Line(
        policy,
        tuple(float(np.mean([row["context_tokens"] for row in own])) for own in ordered),
        tuple(float(np.mean([row[key] for row in own])) for own in ordered),
    )


def size(power: int) -> str:
    """A power of two bytes as people read it."""
    unit = max(0, min(4, power // 10))
    return f"{2 ** (power - 10 * unit)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def _tokens(power: int) -> str:
    return f"{2 ** (power - 10)}K" if power >= 10 else str(2**power)


Part = Memory
