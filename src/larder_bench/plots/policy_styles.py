"""Which color, marker and dashes each policy has: the same in every figure of one set of results.

Colors are those of M. Okabe and K. Ito, "Color Universal Design" (2008), which people with any
color vision tell apart, and two of P. Tol's; markers say the same again. Controls are gray, with
dashes of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from larder_bench.plots.style import FAINT, SOFT

# Each with a darker one, for words.
COLORS = (
    ("#0072b2", "#005c90"),
    ("#d55e00", "#ad4c00"),
    ("#009e73", "#00735a"),
    ("#cc79a7", "#9c4f79"),
    ("#e69f00", "#8f6300"),
    ("#56b4e9", "#2a759f"),
    ("#882255", "#882255"),
    ("#999933", "#6e6e1f"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
FULL = "full"
Dashes = tuple[float, tuple[float, ...]]
SOLID: Dashes = (0.0, ())
CONTROLS: dict[str, Dashes] = {
    FULL: (0.0, (5.0, 2.0)),
    "random": (0.0, (1.0, 1.6)),
    "oracle": (0.0, (5.0, 1.5, 1.0, 1.5)),
    "exact_question": (0.0, (5.0, 1.5, 1.0, 1.5)),
    "exact_topk": (0.0, (2.5, 1.2)),
    "clairvoyant": (0.0, (5.0, 1.5, 1.0, 1.5)),
    "bound": (0.0, (5.0, 2.0)),
    "rag_2k": (0.0, (7.0, 1.5, 1.0, 1.5, 1.0, 1.5)),
    "rag_episodic": (0.0, (3.0, 1.2, 1.0, 1.2)),
}
PALE = "#d3d6da"
_NAMES = {FULL: "full cache"}
_LONGEST = 36  # letters of a policy's name


@dataclass(frozen=True)
class PolicyStyle:
    """Drawing style of a policy.

    Args:
        name: as labels give it.
        color: of lines and marks.
        dark: of words.
        marker: empty for a control, which has dashes instead.
        dashes: off and on, as matplotlib takes them.
        is_labeled: whether it has a label; there are more policies than colors otherwise.
    """

    name: str
    color: str
    dark: str
    marker: str
    dashes: Dashes
    is_labeled: bool = True

    @property
    def is_control(self) -> bool:
        return not self.marker and self.is_labeled


def assign_styles(policies: Iterable[str]) -> dict[str, PolicyStyle]:
    """A look for each policy, in the order given; those that find no color left are pale."""
    found: dict[str, PolicyStyle] = {}
    colored = 0
    for policy in dict.fromkeys(policies):
        if policy in CONTROLS:
            found[policy] = PolicyStyle(short_label(policy), FAINT, SOFT, "", CONTROLS[policy])
        elif colored < len(COLORS):
            color, dark = COLORS[colored]
            found[policy] = PolicyStyle(short_label(policy), color, dark, MARKERS[colored], SOLID)
            colored += 1
        else:
            found[policy] = PolicyStyle(
                short_label(policy), PALE, SOFT, "", SOLID, is_labeled=False
            )
    return found


def styles_for(
    all_looks: Mapping[str, PolicyStyle], policies: Collection[str]
) -> dict[str, PolicyStyle]:
    """The looks of those policies that one drawing shows, in their order.

    Pale ones take the colors that none of the others has, as far as these go.
    """
    found = {name: look for name, look in all_looks.items() if name in policies}
    used = {look.color for look in found.values()}
    free = [
        (*colors, m) for colors, m in zip(COLORS, MARKERS, strict=True) if colors[0] not in used
    ]
    pale = [name for name, look in found.items() if not look.is_labeled]
    for name, (color, dark, marker) in zip(pale, free, strict=False):
        found[name] = PolicyStyle(short_label(name), color, dark, marker, SOLID)
    return found


def controls_last(policies: Sequence[str]) -> list[str]:
    """The policies in their order, controls behind them."""
    return sorted(policies, key=lambda policy: policy in CONTROLS)


def short_label(policy: str) -> str:
    """A policy's name as long as a label can be."""
    name = _NAMES.get(policy, policy)
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
