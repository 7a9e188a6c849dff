"""The support table of the documentation is the one of the registry."""

from __future__ import annotations

import pytest

from architectures.families import Status, families
from architectures.support_table import MARKED, PAGES, ROOT, with_tables

COMMAND = "PYTHONPATH=tests python -m architectures.support_table"


@pytest.mark.parametrize("name", PAGES)
def test_committed_pages(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert MARKED.search(page)
    assert with_tables(page) == page, f"run: {COMMAND}"


def test_a_page_without_its_rows() -> None:
    page = "# Head\n<!-- families: table -->\n<!-- families: end -->\nFoot\n"
    filled = with_tables(page)
    assert filled.count("\n| ") == len(families()) + 2
    assert with_tables(filled) == filled and filled.endswith("Foot\n")


def test_rows() -> None:
    names = [family.name for family in families()]
    assert len(set(names)) == len(names)
    for family in families():
        assert bool(family.refusal) == (family.status is Status.REFUSED)
