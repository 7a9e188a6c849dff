"""Marks over packed entries."""

from __future__ import annotations

import torch

from larder.ops import is_in_sorted, mask_of, mask_outside, mask_until, unmasked_indices


def test_mask_outside_hand_values() -> None:
    positions = torch.tensor([5, 0, 3, 4, 9], dtype=torch.int32)
    assert mask_outside(positions, 4, 9).tolist() == [False, True, True, False, True]
    assert mask_outside(positions, 0, 9).tolist() == [False, False, False, False, True]
    assert mask_outside(positions, 6, 4).tolist() == [True] * 5
    assert mask_until(positions, 4).tolist() == [False, True, True, True, False]


def test_mask_and_unmasked_indices_hand_values() -> None:
    marks = mask_of(torch.tensor([1, 4]), 5)
    assert marks.tolist() == [False, True, False, False, True]
    assert unmasked_indices(marks).tolist() == [0, 2, 3]


def test_is_in_sorted_hand_values() -> None:
    held, wanted = torch.tensor([2, 3, 7]), torch.tensor([7, 1, 4, 9, 2])
    assert is_in_sorted(wanted, held).tolist() == [True, False, False, False, True]
    assert is_in_sorted(wanted, held[:0]).tolist() == [False] * 5
