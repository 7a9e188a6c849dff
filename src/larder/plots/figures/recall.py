"""How many of the true nearest keys each index finds; IceCache's figure 3.

A panel for each k, and for each layer where rows tell layers apart. The curve runs over the entries
that are fetched, the length of the context, or the steps of decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from larder.bench.amounts import by_size
from larder.bench.rows import Results, Row
from larder.plots import scores
from larder.plots.figures.base import Figure, Looks, numbered
from larder.plots.lines import Axis, Line, Panel, doublings, draw, even
from larder.plots.style import Drawing, styled


class Along(Enum):
    """What a curve runs over: entries that are fetched, tokens of context, or decoding steps."""

    FETCHED = "fetched_tokens"
    TOKENS = "tokens"
    STEP = "step"


_TITLES = {
    Along.FETCHED: "entries fetched",
    Along.TOKENS: "tokens of context",
    Along.STEP: "decoding step",
}


@dataclass(frozen=True)
class Recall(Figure):
    """Recall curves.

    Args:
        along: `fetched_tokens`, `tokens` or `step`.
    """

    along: Along = Along.FETCHED

    def draw(self, results: Results, looks: Looks) -> list[Drawing]:
        charts = self.charts(results, looks)
        if not charts:
            raise self.nothing(f"rows of kind 'recall' with {self.along.value}")
        caption = (
            "Recall: the share of the k entries with the largest products that each index finds, "
            f"against {_TITLES[self.along]}; means over files."
        )
        return [
            Drawing(
                numbered("recall", number, len(charts)),
                scores.joined("Recall of the indexes", label),
                caption,
                self._figure(panels, looks),
            )
            for number, (label, panels) in enumerate(charts)
        ]

    def charts(self, results: Results, looks: Looks) -> list[tuple[str, list[Panel]]]:
        """What is drawn, in numbers: a sheet for each study and model."""
        key = self.along.value
        rows = [r for r in results.shown("recall") if r["policy"] in looks and r[key] is not None]
        # What fetches without a limit has no place on a scale of doublings.
        rows = [row for row in rows if self.along is Along.STEP or row[key] > 0]
        if self.along is not Along.STEP and (whole := [r for r in rows if r["layer"] is None]):
            rows = whole  # beside them are layers and steps one by one
        return [
            (label, self._panels(own))
            for label, own in scores.families(scores.beside_each(rows)).items()
        ]

    def _panels(self, rows: Sequence[Row]) -> list[Panel]:
        ranks = sorted({int(rank) for row in rows for rank in row["recall"]})
        layers = list(dict.fromkeys(row["layer"] for row in rows))
        # Budgets lie along the entries that are fetched; anywhere else they are apart.
        is_apart = self.along is not Along.FETCHED and len({row["budget"] for row in rows}) > 1
        budgets = by_size(list({row["budget"] for row in rows})) if is_apart else [""]
        return [
            Panel(scores.joined(f"recall@{rank}", _of_layer(layer), budget), lines)
            for budget in budgets
            for layer in layers
            for rank in ranks
            if (lines := self._lines(_those(rows, layer, budget), str(rank)))
        ]

    def _figure(self, panels: Sequence[Panel], looks: Looks) -> object:
        ends = [y for panel in panels for line in panel.lines for y in line.ys]
        low = 0.0 if min(ends) < 0.5 else 0.1 * math.floor(10 * min(ends) - 0.2)
        with styled():
            x = self._across([x for panel in panels for line in panel.lines for x in line.xs])
            return draw(panels, dict(looks), x, even("recall", low, 1.02))

    def _lines(self, rows: Sequence[Row], rank: str) -> tuple[Line, ...]:
        found: dict[str, dict[float, list[float]]] = {}
        for row in rows:
            if rank in row["recall"]:
                points = found.setdefault(row["policy"], {})
                points.setdefault(float(row[self.along.value]), []).append(row["recall"][rank])
        return tuple(
            Line(policy, tuple(sorted(own)), tuple(float(np.mean(own[x])) for x in sorted(own)))
            for policy, own in found.items()
        )

    def _across(self, values: Sequence[float]) -> Axis:
        label = _TITLES[self.along]
        if self.along is not Along.STEP:
            return doublings(label, values, _count)
        room = 0.04 * (max(values) - min(values) or 1.0)
        return even(label, min(values) - room, max(values) + room)


def _of_layer(layer: int | None) -> str:
    return "" if layer is None else f"layer {layer}"


def _those(rows: Sequence[Row], layer: int | None, budget: str) -> list[Row]:
    own = [row for row in rows if row["layer"] == layer]
    return [row for row in own if budget in ("", row["budget"])]


def _count(power: int) -> str:
    return f"{2 ** (power - 10)}K" if power >= 10 else str(2**power)


Part = Recall
