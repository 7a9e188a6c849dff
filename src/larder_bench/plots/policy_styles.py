"""Colors, markers and dashes of policies: the same in every figure of one set of results.

Colors are those of M. Okabe and K. Ito, "Color Universal Design" (2008), which are distinguishable
with any color vision, and two of P. Tol's; markers are redundant to them. Controls are gray, each
with its own dashes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from larder_bench.plots.style import FAINT, SOFT

# Each with a darker one for text.
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
_NAMES = {
    FULL: "full cache",
    "whole, reconstruct, global, turboquant(bits=4)": "kvzip > turboquant(bits=4)",
    "whole, reconstruct, global, kvquant": "kvzip > kvquant",
    "whole, reconstruct, global, rdkv": "kvzip > rdkv",
    "whole, snapkv, global, rdkv": "snapkv > rdkv",
}
_LONGEST = 36  # characters of a policy's label


@dataclass(frozen=True)
class PolicyStyle:
    """Drawing style of a policy.

    Args:
        name: label of the policy.
        color: color of lines and markers.
        dark: color of text.
        marker: marker; empty for a control, which has dashes instead.
        dashes: dash pattern, as matplotlib takes it.
        is_labeled: whether it has a label; False if there are more policies than colors.
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
    """Style of each policy, in the given order; policies without a free color are pale."""
    styles: dict[str, PolicyStyle] = {}
    colored = 0
    for policy in dict.fromkeys(policies):
        if policy in CONTROLS:
            styles[policy] = PolicyStyle(short_label(policy), FAINT, SOFT, "", CONTROLS[policy])
        elif colored < len(COLORS):
            color, dark = COLORS[colored]
            styles[policy] = PolicyStyle(short_label(policy), color, dark, MARKERS[colored], SOLID)
            colored += 1
        else:
            styles[policy] = PolicyStyle(
                short_label(policy), PALE, SOFT, "", SOLID, is_labeled=False
            )
    return styles


def styles_for(
    all_styles: Mapping[str, PolicyStyle], policies: Collection[str]
) -> dict[str, PolicyStyle]:
    """Styles of the policies that a drawing shows, in their order.

    Pale ones get colors that no other one has, as long as there are any.
    """
    styles = {name: style for name, style in all_styles.items() if name in policies}
    used = {style.color for style in styles.values()}
    free = [
        (*colors, m) for colors, m in zip(COLORS, MARKERS, strict=True) if colors[0] not in used
    ]
    pale = [name for name, style in styles.items() if not style.is_labeled]
    for name, (color, dark, marker) in zip(pale, free, strict=False):
        styles[name] = PolicyStyle(short_label(name), color, dark, marker, SOLID)
    return styles


def controls_last(policies: Sequence[str]) -> list[str]:
    """Policies in their order, controls last."""
    return sorted(policies, key=lambda policy: policy in CONTROLS)


def short_label(policy: str) -> str:
    """Label of a policy, truncated to the maximum length."""
    name = _NAMES.get(policy, policy)
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
