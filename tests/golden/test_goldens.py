"""Nothing that others rely on has changed: everything equals its golden.

A failure names the golden and the places in it. Where a change is meant, `golden.make` writes the
golden anew.
"""

from __future__ import annotations

import pytest

from golden import homes
from golden.comparison import TOLERANCE, check
from golden.every import GOLDENS, LISTINGS, SLOW, TOLERANCES


@pytest.mark.parametrize(
    "name", [*GOLDENS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_unchanged(name: str) -> None:
    found = (GOLDENS | SLOW)[name]()
    check(name, found, TOLERANCES.get(name, TOLERANCE), may_grow=name in LISTINGS)


def test_a_cache_whose_layers_share_entries_comes_back() -> None:
    assert homes.paired_answer() == "July 5"
