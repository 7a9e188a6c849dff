"""Means over heads: both forms agree, and tell heads that hold other positions."""

from __future__ import annotations

import pytest
import torch

from larder.ops import layer_mean
from without_kernels import reference

STARTS, LENGTHS = torch.tensor([1, 5]), torch.tensor([3, 3])


@pytest.mark.parametrize("form", [layer_mean, reference(layer_mean)])
def test_only_heads_with_equal_positions_are_averaged(form) -> None:
    positions = torch.tensor([9, 0, 2, 5, 9, 0, 2, 5, 9], dtype=torch.int32)
    numbers = torch.tensor([[0, 1, 2, 3, 0, 5, 6, 7, 0], [9, 3, 2, 1, 9, 3, 2, 5, 9.0]])
    mean = form(numbers, positions, STARTS, LENGTHS)
    assert mean is not None and mean.tolist() == [3.0, 3.0, 4.0]
    positions[7] = 6
    assert form(numbers, positions, STARTS, LENGTHS) is None
    assert form(numbers, positions, STARTS, torch.tensor([3, 2])) is None
