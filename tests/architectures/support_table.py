"""Generator of the support table of the documentation from the registry of families.

    PYTHONPATH=tests python -m architectures.support_table

fills the space between the marks `<!-- families: table -->` (a line per family) and
`<!-- families: names -->` (names alone), `<!-- families: figures -->` (measured figures of
`figures.json`) and `<!-- families: end -->` of the pages of `PAGES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from architectures.families import Family, Status, families, with_status
from architectures.figures import DTYPES, STEPS, Figures, committed

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/architectures.md")
MARKED = re.compile(
    r"(<!-- families: (table|names|figures) -->\n)(?:.*?\n)??(<!-- families: end -->)", re.DOTALL
)


def with_tables(page: str) -> str:
    """Page with the text between all its marks generated."""
    return MARKED.sub(lambda mark: f"{mark[1]}{LAYOUTS[mark[2]]()}\n{mark[3]}", page)


def support_table() -> str:
    """Markdown table with a line per family."""
    head = ["family", "published models", "layers", "supported", "notes"]
    return "\n".join([_line(*head), _line(*["---"] * len(head)), *map(_row, families())])


def family_names() -> str:
    """Names of the supported families, and of the refused ones."""
    lines = [f"Supported: {_names(Status.SUPPORTED)}."]
    if refused := _names(Status.REFUSED):
        lines.append(f"Refused, with the reason: {refused}.")
    return "\n".join(lines)


def figures_table() -> str:
    """Markdown table of the measured figures of each supported family."""
    head = ["family"]
    for dtype in DTYPES:
        head += [f"{dtype}: logits", "beyond", "equal steps", "policies", "peak"]
    known = committed()
    rows = [
        _line(
            family.name, *(cell for dtype in DTYPES for cell in _cells(known[family.name][dtype]))
        )
        for family in with_status(Status.SUPPORTED)
    ]
    return "\n".join([_line(*head), _line(*["---"] * len(head)), *rows])


def _cells(found: Figures) -> tuple[str, ...]:
    peak = "-" if found.peak is None else f"{found.peak:.2f}"
    steps = f"{found.equal_steps}/{STEPS}"
    return (f"{found.logits:.1e}", str(found.beyond), steps, str(found.policies), peak)


LAYOUTS: Mapping[str, Callable[[], str]] = {
    "table": support_table,
    "names": family_names,
    "figures": figures_table,
}


def _row(family: Family) -> str:
    return _line(family.name, family.models, family.layers, family.status.value, family.note)


def _names(status: Status) -> str:
    return ", ".join(family.name for family in with_status(status))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write all pages."""
    for name in PAGES:
        path = ROOT / name
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
