"""Goldens: outputs that users rely on equal the committed ones.

A failure names the golden and the places in it. Where a change is meant, `golden.make` writes the
golden again.
"""

from __future__ import annotations

import pytest

from golden import homes
from golden.comparison import TOLERANCE, check
from golden.every import EXTENDED, GOLDENS, LISTINGS, SLOW, TOLERANCES

CASES = [
    *(name for name in GOLDENS if name not in EXTENDED),
    *(pytest.param(name, marks=pytest.mark.extended) for name in GOLDENS if name in EXTENDED),
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
]


@pytest.mark.parametrize("name", CASES)
def test_golden_is_unchanged(name: str) -> None:
    found = (GOLDENS | SLOW)[name]()
    check(name, found, TOLERANCES.get(name, TOLERANCE), may_grow=name in LISTINGS)


def test_cache_with_shared_layers_is_restored() -> None:
    assert homes.paired_answer() == "July 5"
