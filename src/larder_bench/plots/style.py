"""Style of figures: widths of a paper's column and page, small type, no redundant frame.

Figures are drawn by matplotlib without global state (pyplot) and without changing settings of
others. Text stays text in an SVG. Equal data gives equal bytes: ids have a fixed salt and no date
is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from io import BytesIO
from typing import Any

from larder.core import DependencyError

COLUMN, PAGE = 3.3, 6.9  # inches
FONT = "DejaVu Sans"  # comes with matplotlib, so that text has one width everywhere
DPI = 300
SMALL, NORMAL, TITLE = 6.2, 6.8, 7.4  # points
INK, SOFT, FAINT, LINE, PAPER = "#1c1e22", "#565b63", "#8b9098", "#dfe2e6", "#ffffff"
CREATOR = "larder plot"
_RULES: dict[str, Any] = {
    "font.family": [FONT],
    "font.size": NORMAL,
    "axes.titlesize": TITLE,
    "axes.titlelocation": "left",
    "axes.titlepad": 4.0,
    "axes.labelsize": NORMAL,
    "axes.labelcolor": SOFT,
    "axes.labelpad": 3.0,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": LINE,
    "grid.linewidth": 0.5,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.pad": 2.5,
    "ytick.major.pad": 2.5,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "text.color": INK,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.6,
    "lines.solid_capstyle": "round",
    "hatch.linewidth": 0.5,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",
    "svg.hashsalt": "larder",
    "path.simplify": False,
}

# Settings of the program instead of the style, or that may not be set while it runs.
_UNTOUCHED_RULES = frozenset({"backend", "backend_fallback", "interactive", "toolbar", "timezone"})


class ImageFormat(Enum):
    """File format of a figure."""

    SVG = "svg"
    PNG = "png"


class FigureWidth(Enum):
    """Width of a figure: a column of 3.3 inches, or a page of 6.9."""

    COLUMN = "column"
    PAGE = "page"

    @property
    def inches(self) -> float:
        return COLUMN if self is FigureWidth.COLUMN else PAGE


@dataclass(frozen=True)
class Drawing:
    """Figure that is ready to be saved.

    Args:
        name: name of its files, without an extension.
        title: title.
        caption: description in whole sentences.
        figure: matplotlib figure.
    """

    name: str
    title: str
    caption: str
    figure: Any

    def save(self, form: ImageFormat) -> bytes:
        """Bytes of an image file. Equal drawings give equal bytes with one version of
        matplotlib.
        """
        buffer = BytesIO()
        metadata = (
            {"Creator": CREATOR, "Date": None} if form is ImageFormat.SVG else {"Software": CREATOR}
        )
        with figure_style():
            self.figure.savefig(buffer, format=form.value, dpi=DPI, metadata=metadata)
        return buffer.getvalue()


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw in this style until the end of the block.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context, rcParamsDefault
    except ImportError as error:
        raise DependencyError(
            "Figures need matplotlib, which is not installed: pip install 'larder[bench]'."
        ) from error
    rules: Any = {
        name: rcParamsDefault[name] for name in rcParamsDefault if name not in _UNTOUCHED_RULES
    }
    with rc_context(rules | _RULES):
        yield
