"""Marks over packed entries."""

from __future__ import annotations

import torch

from larder.ops.marking import are_among, marks_of, outside, places_unmarked, until


def test_outside_a_range() -> None:
    positions = torch.tensor([5, 0, 3, 4, 9], dtype=torch.int32)
    assert outside(positions, 4, 9).tolist() == [False, True, True, False, True]
    assert outside(positions, 0, 9).tolist() == [False, False, False, False, True]
    assert outside(positions, 6, 4).tolist() == [True] * 5
    assert until(positions, 4).tolist() == [False, True, True, True, False]


def test_marks_and_what_they_leave_out() -> None:
    marks = marks_of(torch.tensor([1, 4]), 5)
    assert marks.tolist() == [False, True, False, False, True]
    assert places_unmarked(marks).tolist() == [0, 2, 3]


def test_what_an_ascending_row_holds() -> None:
    held, wanted = torch.tensor([2, 3, 7]), torch.tensor([7, 1, 4, 9, 2])
    assert are_among(wanted, held).tolist() == [True, False, False, False, True]
    assert are_among(wanted, held[:0]).tolist() == [False] * 5
