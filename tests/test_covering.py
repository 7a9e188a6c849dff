"""Covering cases: every value in the default suite, every case in one of the suites."""

from __future__ import annotations

from itertools import product

from covering import covering, one_in


def test_every_value_is_in_the_default_suite_and_every_case_once() -> None:
    axes = ["a", "b", "c", "d"], [1, 2, 3], [True, False]
    cases = covering(*axes)
    assert [case.values for case in cases] == list(product(*axes))
    default = [case.values for case in cases if not case.marks]
    assert len(default) == 4
    assert [set(axis) for axis in zip(*default, strict=True)] == [set(axis) for axis in axes]
    assert {mark.name for case in cases for mark in case.marks} == {"extended"}


def test_one_value_in_three_is_in_the_default_suite() -> None:
    cases = one_in(3, "abcde")
    assert [case.values for case in cases] == [("a",), ("b",), ("c",), ("d",), ("e",)]
    assert [bool(case.marks) for case in cases] == [False, True, True, False, True]
