"""Base of figures: result rows in, drawings out. One file is one kind, named like the file.

The parameters of a figure are the fields of its class, written as those of policy parts are:
`quality(score="f1")`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from larder.core.errors import InputError
from larder.core.family import Family
from larder.core.spelling import name_of
from larder_bench.plots.policy_styles import PolicyStyle
from larder_bench.plots.style import Drawing
from larder_bench.results.rows import Results

FIGURES = Family("figure", "larder_bench.plots.figures")
MAX_PANELS = 12  # policies that have a panel each, if they are not chosen
PolicyStyles = Mapping[str, PolicyStyle]


class CountedBytes(Enum):
    """Which bytes of a cache count.

    ACTIVE: what one question attends to, or holds in the fast tier.
    HELD: all tiers and episodes together.
    PEAK: the most at any time, while reading, too.
    """

    ACTIVE = "active"
    HELD = "held"
    PEAK = "peak"

    @property
    def key(self) -> str:
        """Their name in a cell."""
        return "kv_bytes" if self is CountedBytes.HELD else f"{self.value}_kv_bytes"


class NothingToDraw(InputError):
    """The results hold nothing of what a figure shows."""


@dataclass(frozen=True)
class Figure(ABC):
    """A kind of figure. Values are frozen; drawing changes nothing."""

    @abstractmethod
    def draw(self, results: Results, looks: PolicyStyles) -> list[Drawing]:
        """One drawing or several, all that the results suffice for.

        Args:
            looks: of every policy in the results; others are not drawn.

        Raises:
            NothingToDraw: the results hold no row that this figure shows.
        """

    def nothing(self, wanted: str) -> NothingToDraw:
        """The error for results without what is wanted."""
        return NothingToDraw(
            f"The figure {name_of(type(self))} needs {wanted}, and the result files hold none: "
            "name others, or another --figure."
        )


def panel_policies(policies: Sequence[str], looks: PolicyStyles) -> list[str]:
    """Policies with a panel of their own: all if they are few, otherwise those with a color."""
    if len(policies) <= MAX_PANELS:
        return list(policies)
    return [policy for policy in policies if looks[policy].is_labeled]


def drawing_name(name: str, number: int, count: int) -> str:
    """The name of one drawing among several."""
    return name if count == 1 else f"{name}-{number + 1}"
