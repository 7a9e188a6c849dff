"""Each promise of docs/serving.md has tests that exist; docs/promises.md is the list."""

from __future__ import annotations

import re
from pathlib import Path

from test_failures import LONG, marks

DOCS = Path(__file__).parent.parent / "docs"
ROW = re.compile(r"\| (.+) \| ((?:`[^`]+::test_\w+`(?:, )?)+) \|")
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


def joined(text: str) -> str:
    return " ".join(text.split())


def rows() -> dict[str, list[tuple[str, str]]]:
    """By heading, each promise and the cell that names its tests."""
    found, heading = dict[str, list[tuple[str, str]]](), ""
    for line in (DOCS / "promises.md").read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif row := ROW.fullmatch(line):
            found.setdefault(heading, []).append((row[1], row[2]))
    return found


def has_quick_cases(own: set[str]) -> bool:
    """True if not all cases of a test are long; marks of one case stand in a `pytest.param`."""
    return "param" in own or not LONG & own


def test_every_section_of_serving_has_promises() -> None:
    page = (DOCS / "serving.md").read_text()
    headings = HEADING.findall(page)
    assert len(headings) > 20 and set(headings) == set(rows())


def test_every_promise_is_in_serving_and_has_tests() -> None:
    page = joined((DOCS / "serving.md").read_text())
    for promises in rows().values():
        for promise, cell in promises:
            assert promise in page, f"serving.md does not say: {promise}"
            named = NAMED.findall(cell)
            for path, test in named:
                assert test in marks(path), f"{path} has no {test}: mend promises.md"
            is_quick = any(has_quick_cases(marks(path)[test]) for path, test in named)
            assert is_quick, f"shown by long tests alone: {promise}"


def test_every_table_row_is_parsed() -> None:
    lines = (DOCS / "promises.md").read_text().splitlines()
    result = [line for line in lines if "::" in line and not line.startswith("quoted;")]
    assert len(result) == sum(len(promises) for promises in rows().values()) > 80
