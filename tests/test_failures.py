"""Coverage of the 32 failures of docs/failure_tests.md by existing tests.

A test of failure 7 has the mark `failure(number=7)`, and the page names it in row 7.
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
FAILURE = re.compile(r"pytest\.mark\.failure\(number=(\d+)\)")
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


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


@cache
def failure_numbers(path: str) -> dict[str, set[int]]:
    """By test function of a file, the numbers of its `failure` marks."""
    functions = ast.walk(ast.parse((TESTS / path).read_text()))
    return {
        f.name: {
            int(number)
            for each in f.decorator_list
            for number in FAILURE.findall(ast.unparse(each))
        }
        for f in functions
        if isinstance(f, ast.FunctionDef)
    }


def test_every_failure_has_existing_tests() -> None:
    cells = rows()
    assert sorted(cells) == list(NUMBERS)
    for number, cell in cells.items():
        named = NAMED.findall(cell)
        assert named, f"failure {number} has no test: {PAGE.name} names none"
        for path, test in named:
            assert test in marks(path), f"{path} has no {test}: mend {PAGE.name}"
            assert number in failure_numbers(path)[test], f"{test} has no mark of failure {number}"
        quick = [test for path, test in named if not LONG & marks(path)[test]]
        assert quick, f"failure {number} is shown by long tests alone"


def test_marks_are_found() -> None:
    assert (
        "stress"
        in marks("store/test_crashes.py")[
            "test_save_killed_two_hundred_times_keeps_the_committed_state"
        ]
    )
    assert (
        "skipif"
        in marks("store/test_crashes.py")[
            "test_save_killed_at_random_times_keeps_the_committed_state"
        ]
    )
    assert failure_numbers("store/test_crashes.py")[
        "test_save_killed_at_random_times_keeps_the_committed_state"
    ] == {3}
