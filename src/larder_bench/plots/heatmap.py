"""Tables of numbers as colored cells: one hue, pale for little and deep for much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from larder_bench.plots.layout import overlay_axes, text_width
from larder_bench.plots.style import LINE, SMALL, SOFT

# From pale to deep; lightness falls evenly, so that it reads in gray and by any color vision.
RAMP = ("#f1f5f9", "#c9dcec", "#94bfdd", "#5499c7", "#2471a3", "#154872")
# On colored cells, which are the same in a dark page: not the ink that such a page turns light.
ON_PALE, ON_DEEP = "#20242b", "#fbfcfd"
GAP = 0.04  # of a cell, between cells
_HALF = 0.55  # of the ramp, from where words on it are light


@dataclass(frozen=True)
class ColorScale:
    """Which number has which color.

    Args:
        low: of the palest.
        high: of the deepest.
    """

    low: float
    high: float

    def place(self, value: float) -> float:
        """Position of a number on the color ramp, in [0, 1]."""
        return min(1.0, max(0.0, (value - self.low) / ((self.high - self.low) or 1.0)))

    def color(self, value: float) -> str:
        """A color of the ramp, between two of its stops."""
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
    size: float = SMALL,
) -> None:
    """Cells row by row from above; where there is no number, an empty frame.

    Args:
        texts: what stands in the cells; nothing unless given.
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
                    column + 0.5, row + 0.52, texts[row][column], color=ink, size=size,
                    ha="center", va="center",
                )  # fmt: skip
    axes.set_xlim(0, max(len(line) for line in values))
    axes.set_ylim(len(values), 0)


def draw_color_key(
    figure: Any, scale: ColorScale, ends: tuple[str, str], title: str, left: float, top: float
) -> None:
    """Color legend: a title, and the ramp between the names of its ends."""
    from matplotlib.patches import Rectangle

    sheet = overlay_axes(figure)
    y = figure.get_size_inches()[1] - top
    x = left + text_width(title, SMALL) + 0.12
    sheet.text(left, y, title, color=SOFT, size=SMALL, va="center")
    sheet.text(x, y, ends[0], color=SOFT, size=SMALL, va="center")
    x += text_width(ends[0], SMALL) + 0.06
    steps, width = 60, 0.9
    for step in range(steps):
        value = scale.low + (scale.high - scale.low) * step / (steps - 1)
        sheet.add_patch(
            # A hair wider than its step, or renderers would leave seams.
            Rectangle(
                (x + step * width / steps, y - 0.04), width / steps + 0.004, 0.08,
                facecolor=scale.color(value), lw=0,
            )
        )  # fmt: skip
    sheet.text(x + width + 0.06, y, ends[1], color=SOFT, size=SMALL, va="center")


def _parts(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
