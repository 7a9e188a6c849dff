"""The support table of the documentation is the one of the registry."""

from __future__ import annotations

import pytest

from architectures.families import Status, families
from architectures.support_table import MARKED, PAGES, ROOT, with_tables

COMMAND = "PYTHONPATH=tests python -m architectures.support_table"


@pytest.mark.parametrize("name", PAGES)
def test_committed_pages_have_the_current_tables(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert MARKED.search(page)
    assert with_tables(page) == page, f"run: {COMMAND}"


def test_empty_table_is_filled_with_a_row_per_family() -> None:
    page = "# Head\n<!-- families: table -->\n<!-- families: end -->\nFoot\n"
    filled = with_tables(page)
    assert filled.count("\n| ") == len(families()) + 2
    assert with_tables(filled) == filled and filled.endswith("Foot\n")


def test_only_refused_families_have_a_refusal() -> None:
    names = [family.name for family in families()]
    assert len(set(names)) == len(names)
    for family in families():
        assert bool(family.refusal) == (family.status is Status.REFUSED)
