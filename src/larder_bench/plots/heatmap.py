"""Heatmaps: tables of numbers as colored cells, pale for low and deep for high values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from larder_bench.plots.layout import overlay_axes, text_width
from larder_bench.plots.style import LINE, SMALL, SOFT

# From pale to deep; lightness decreases evenly, so that it is readable in gray and with any color
# vision.
RAMP = ("#f1f5f9", "#c9dcec", "#94bfdd", "#5499c7", "#2471a3", "#154872")
# Text on colored cells, which look the same on a dark page, unlike the page's text color.
ON_PALE, ON_DEEP = "#20242b", "#fbfcfd"
GAP = 0.04  # of a cell, between cells
_KEY_TOP = 0.12  # of the color legend, below the top of the figure in inches
_HALF = 0.55  # of the ramp, from which text on it is light


@dataclass(frozen=True)
class ColorScale:
    """Color scale of a heatmap.

    Args:
        low: value of the palest color.
        high: value of the deepest color.
    """

    low: float
    high: float

    def place(self, value: float) -> float:
        """Position of a number on the color ramp, in [0, 1]."""
        return min(1.0, max(0.0, (value - self.low) / ((self.high - self.low) or 1.0)))

    def color(self, value: float) -> str:
        """Color of a number, interpolated between two stops of the ramp."""
        position = self.place(value) * (len(RAMP) - 1)
        first = min(int(position), len(RAMP) - 2)
        parts = zip(_parts(RAMP[first]), _parts(RAMP[first + 1]), strict=True)
        mixed = (round(a + (b - a) * (position - first)) for a, b in parts)
        return "#" + "".join(f"{part:02x}" for part in mixed)


def draw_heatmap(
    axes: Any,
    values: Sequence[Sequence[float | None]],
    scale: ColorScale,
    texts: Sequence[Sequence[str]] | None = None,
) -> None:
    """Draw cells row by row from the top; an empty frame where there is no number.

    Args:
        texts: text of each cell; none by default.
    """
    from matplotlib.patches import Rectangle

    for row, line in enumerate(values):
        for column, value in enumerate(line):
            corner, side = (column + GAP / 2, row + GAP / 2), 1 - GAP
            if value is None:
                axes.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=LINE, lw=0.5))
                continue
            axes.add_patch(Rectangle(corner, side, side, facecolor=scale.color(value), lw=0))
            if texts is not None:
                ink = ON_DEEP if scale.place(value) > _HALF else ON_PALE
                axes.text(
                    column + 0.5, row + 0.52, texts[row][column], color=ink, size=SMALL,
                    ha="center", va="center",
                )  # fmt: skip
    axes.set_xlim(0, max(len(line) for line in values))
    axes.set_ylim(len(values), 0)


def draw_color_key(
    figure: Any, scale: ColorScale, ends: tuple[str, str], title: str, left: float
) -> None:
    """Draw a color legend: a title, and the ramp between the labels of its ends."""
    from matplotlib.patches import Rectangle

    overlay = overlay_axes(figure)
    y = figure.get_size_inches()[1] - _KEY_TOP
    x = left + text_width(title, SMALL) + 0.12
    overlay.text(left, y, title, color=SOFT, size=SMALL, va="center")
    overlay.text(x, y, ends[0], color=SOFT, size=SMALL, va="center")
    x += text_width(ends[0], SMALL) + 0.06
    steps, width = 60, 0.9
    for step in range(steps):
        value = scale.low + (scale.high - scale.low) * step / (steps - 1)
        overlay.add_patch(
            # Slightly wider than its step, otherwise renderers would leave seams.
            Rectangle(
                (x + step * width / steps, y - 0.04), width / steps + 0.004, 0.08,
                facecolor=scale.color(value), lw=0,
            )
        )  # fmt: skip
    overlay.text(x + width + 0.06, y, ends[1], color=SOFT, size=SMALL, va="center")


def _parts(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
