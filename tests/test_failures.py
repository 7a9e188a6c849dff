"""Each of the 32 failures that a store and a server must stand is shown by tests that exist.

A test of failure 7 is called `test_7_...`; docs/failure_tests.md names the ones that show it.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "failure_tests.md"
NUMBERS = range(1, 33)
LONG = {"slow", "stress", "gpu"}
ROW = re.compile(r"\| (\d+) \| ([^|]+) \| ([^|]+) \|")
NAMED = re.compile(r"`([\w/]+\.py)::(test_(\d+)_\w+)`")


def rows() -> dict[int, str]:
    """By number, the cell that names tests."""
    found = [ROW.fullmatch(line) for line in PAGE.read_text().splitlines()]
    return {int(row[1]): row[3] for row in found if row}


@cache
def marks(path: str) -> dict[str, set[str]]:
    """By test function of a file, the marks that it has, those of its file included."""
    tree = ast.parse((TESTS / path).read_text())
    everywhere = set[str]()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            everywhere = spelled(node.value)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    own = {f.name: set[str]().union(*map(spelled, f.decorator_list)) for f in functions}
    return {name: marked | everywhere for name, marked in own.items()}


def spelled(node: ast.expr) -> set[str]:
    return {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def test_every_failure_is_shown_by_tests_that_exist() -> None:
    told = rows()
    assert sorted(told) == list(NUMBERS)
    for number, cell in told.items():
        named = NAMED.findall(cell)
        assert named, f"failure {number} has no test: {PAGE.name} names none"
        for path, test, own in named:
            assert int(own) == number, f"{test} stands in the row of failure {number}"
            assert test in marks(path), f"{path} has no {test}: mend {PAGE.name}"
        quick = [test for path, test, _ in named if not LONG & marks(path)[test]]
        assert quick, f"failure {number} is shown by long tests alone"


def test_a_mark_is_found() -> None:
    assert "stress" in marks("store/test_crashes.py")["test_3_killed_two_hundred_times"]
    assert "skipif" in marks("store/test_crashes.py")["test_3_killed_at_any_time"]
