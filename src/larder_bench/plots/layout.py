"""Layout of panels and legends in inches, so that positions are known before drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from larder_bench.plots.policy_styles import PolicyStyle
from larder_bench.plots.style import FAINT, SMALL, SOFT

POINTS = 72.0  # per inch
LINE_HEIGHT = 0.125  # inches from one line of a legend to the next
Entry = TypeVar("Entry")
_SWATCH, _NEAR, _APART = 0.2, 0.05, 0.15  # inches in a legend
_LEGEND_TOP = 0.05  # inches above a legend
_LABEL_GAP = 0.108  # inches from label to label at the ends of lines


@dataclass(frozen=True)
class Margins:
    """Inches around all panels."""

    left: float
    right: float
    top: float
    bottom: float


@dataclass(frozen=True)
class PanelGrid:
    """Grid of equal panels.

    Args:
        width: width of the figure.
        rows: number of rows of panels.
        columns: number of columns of panels.
        panel_height: height of each panel.
        gap_x: horizontal gap between panels.
        gap_y: vertical gap between panels.
    """

    width: float
    rows: int
    columns: int
    panel_height: float
    margins: Margins
    gap_x: float = 0.18
    gap_y: float = 0.42

    @property
    def height(self) -> float:
        gaps = (self.rows - 1) * self.gap_y
        return self.margins.top + self.rows * self.panel_height + gaps + self.margins.bottom

    @property
    def panel_width(self) -> float:
        free = self.width - self.margins.left - self.margins.right
        return (free - (self.columns - 1) * self.gap_x) / self.columns

    def figure(self) -> Any:
        """Empty figure of this size."""
        from matplotlib.figure import Figure

        return Figure(figsize=(self.width, self.height))

    def panel(self, figure: Any, number: int) -> Any:
        """Axes of one panel, counted along rows."""
        row, column = divmod(number, self.columns)
        left = self.margins.left + column * (self.panel_width + self.gap_x)
        top = self.margins.top + row * (self.panel_height + self.gap_y)
        bottom = self.height - top - self.panel_height
        return axes_at(figure, left, bottom, self.panel_width, self.panel_height)

    def is_bottom(self, number: int, count: int) -> bool:
        """Test if a panel of `count` has none below it."""
        return number + self.columns >= count


def axes_at(figure: Any, left: float, bottom: float, width: float, height: float) -> Any:
    """Axes at a position in inches."""
    whole_width, whole_height = figure.get_size_inches()
    return figure.add_axes(
        (left / whole_width, bottom / whole_height, width / whole_width, height / whole_height)
    )


def overlay_axes(figure: Any) -> Any:
    """Axes without decoration over the whole figure, in inches from its lower left corner."""
    width, height = figure.get_size_inches()
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_axis_off()
    axes.patch.set_visible(False)
    return axes


@lru_cache(maxsize=4096)
def text_width(text: str, size: float) -> float:
    """Width of a line of text in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    if not text:
        return 0.0
    font = FontProperties(size=size)
    return TextToPath().get_text_width_height_descent(text, font, ismath=False)[0] / POINTS


def wrap_text(text: str, width: float, size: float, most: int) -> list[str]:
    """Text wrapped at `width` inches; text beyond `most` lines is cut off."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and text_width(longer, size) > width:
            lines.append(line)
            line = word
        else:
            line = longer
    lines.append(line)
    if len(lines) <= most:
        return lines
    last = lines[most - 1]
    while " " in last and text_width(f"{last}…", size) > width:
        last = last.rpartition(" ")[0]
    return [*lines[: most - 1], f"{last.rstrip(' ,.;:?!')}…"]


def spread_labels(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions as near as possible to the wanted ones, at least a gap apart, in the same order.

    Neighbors that are too near form a block around the mean of their wanted positions; if there is
    not enough space for all, the gap shrinks.
    """
    if not wanted:
        return []
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda index: (wanted[index], index))
    blocks: list[tuple[float, int]] = []  # position of a block's first label, and number of labels
    for index in order:
        blocks.append((_clamp(wanted[index], 1, gap, low, high), 1))
        while len(blocks) > 1 and blocks[-2][0] + blocks[-2][1] * gap > blocks[-1][0] + 1e-9:
            (first, many), (second, few) = blocks[-2:]
            total = many + few
            # Each label contributes its wanted position minus its offset in the block.
            start = (first * many + (second - many * gap) * few) / total
            blocks[-2:] = [(_clamp(start, total, gap, low, high), total)]
    positions = [start + step * gap for start, many in blocks for step in range(many)]
    spread = [0.0] * len(wanted)
    for index, position in zip(order, positions, strict=True):
        spread[index] = position
    return spread


def label_ends(figure: Any, axes: Any, ends: Sequence[tuple[float, PolicyStyle]]) -> None:
    """Label lines at their ends, to the right of a panel, with thin connectors to shifted
    labels.
    """
    width, height = figure.get_size_inches()
    box = axes.get_position()
    low, high = box.y0 * height, box.y1 * height
    transform = axes.transData + figure.dpi_scale_trans.inverted()
    heights = [float(transform.transform((axes.get_xlim()[1], end))[1]) for end, _ in ends]
    overlay = overlay_axes(figure)
    left = box.x1 * width
    for (_, style), end, position in zip(
        ends, heights, spread_labels(heights, _LABEL_GAP, low - 0.02, high + 0.02), strict=True
    ):
        overlay.plot([left + 0.02, left + 0.1], [end, position], color=style.color, linewidth=0.5)
        overlay.text(left + 0.13, position, style.name, color=style.dark, size=SMALL, va="center")


def wrapped_entries(
    entries: Sequence[Entry], widths: Sequence[float], width: float
) -> list[list[Entry]]:
    """Entries in lines of at most `width` inches, given the width of each."""
    lines: list[list[Entry]] = [[]]
    used = 0.0
    for entry, needed in zip(entries, widths, strict=True):
        if lines[-1] and used + needed > width:
            lines.append([])
            used = 0.0
        lines[-1].append(entry)
        used += needed
    return lines


def legend_lines(styles: Sequence[PolicyStyle], width: float) -> list[list[PolicyStyle]]:
    """Entries of a legend in lines of at most `width` inches."""
    widths = [_SWATCH + _NEAR + text_width(style.name, SMALL) + _APART for style in styles]
    return wrapped_entries(styles, widths, width)


def draw_legend(figure: Any, lines: Sequence[Sequence[PolicyStyle]], left: float) -> None:
    """Draw a legend at the top of a figure, `left` inches from its left edge."""
    overlay = overlay_axes(figure)
    height = figure.get_size_inches()[1]
    for index, line in enumerate(lines):
        x, y = left, height - _LEGEND_TOP - (index + 0.5) * LINE_HEIGHT
        for style in line:
            marks = [x, x + _SWATCH / 2, x + _SWATCH]
            overlay.plot(
                marks,
                [y] * 3,
                color=style.color,
                linestyle=style.dashes,
                marker=style.marker or None,
                markevery=[1],
                markersize=3.2,
            )
            overlay.text(
                x + _SWATCH + _NEAR,
                y - 0.005,
                style.name,
                color=style.dark,
                size=SMALL,
                va="center",
            )
            x += _SWATCH + _NEAR + text_width(style.name, SMALL) + _APART


def plain_axes(axes: Any) -> None:
    """Remove the frame and the ticks of axes."""
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, labelcolor=SOFT, color=FAINT)


def _clamp(start: float, many: int, gap: float, low: float, high: float) -> float:
    return max(low, min(start, high - (many - 1) * gap))
