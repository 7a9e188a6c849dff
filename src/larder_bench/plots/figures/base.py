"""Base of figures: result rows in, drawings out. Each file is one figure, named like the file.

The parameters of a figure are the fields of its class, spelled like those of policy parts:
`quality(score="f1")`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from larder.core import Family, InputError, public_name
from larder_bench.plots.policy_styles import PolicyStyle
from larder_bench.plots.style import Drawing
from larder_bench.results.rows import Results

FIGURES = Family("figure", "larder_bench.plots.figures")
MAX_PANELS = 12  # policies with a panel each, unless they are selected
PolicyStyles = Mapping[str, PolicyStyle]


class CountedBytes(Enum):
    """Counted bytes of a cache.

    ACTIVE: bytes that one question attends to, or holds in the fast tier.
    HELD: bytes of all tiers and episodes together.
    PEAK: maximum at any time, prefill included.
    """

    ACTIVE = "active"
    HELD = "held"
    PEAK = "peak"

    @property
    def key(self) -> str:
        """Field of a cell."""
        return "kv_bytes" if self is CountedBytes.HELD else f"{self.value}_kv_bytes"


class NothingToDraw(InputError):
    """Error for results without the rows that a figure shows."""


@dataclass(frozen=True)
class Figure(ABC):
    """Kind of figure; frozen, without side effects."""

    @abstractmethod
    def draw(self, results: Results, styles: PolicyStyles) -> list[Drawing]:
        """Drawings of the figure, as many as the results suffice for.

        Args:
            styles: styles of the policies to draw.

        Raises:
            NothingToDraw: the results have no row that this figure shows.
        """

    def nothing(self, required: str) -> NothingToDraw:
        """Error for results without required rows."""
        name = public_name(type(self))
        return NothingToDraw(
            f"The figure {name} needs {required}, but the results files have none: "
            "name others, or another --figure."
        )


def panel_policies(policies: Sequence[str], styles: PolicyStyles) -> list[str]:
    """Policies with a panel of their own: all if they are few, otherwise those with a color."""
    if len(policies) <= MAX_PANELS:
        return list(policies)
    return [policy for policy in policies if styles[policy].is_labeled]


def drawing_name(name: str, number: int, count: int) -> str:
    """Name of one drawing among several."""
    return name if count == 1 else f"{name}-{number + 1}"
