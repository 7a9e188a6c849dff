"""Moments of numbers of which one more comes: both forms have the same bits and equal the loop."""

from __future__ import annotations

import statistics
from random import Random

import pytest
import torch

from larder.ops.fast import moments as fast
from larder.ops.moments import joined_by_one, readable_joined_by_one


def test_both_forms_equal_the_moments_of_all_numbers() -> None:
    source, columns = Random(3), [torch.zeros(6)] * 3
    told: list[list[float]] = [[] for _ in range(6)]
    for _ in range(7):
        counted = [place == 0 or source.random() < 0.6 for place in range(6)]
        numbers = [source.uniform(0, 1) for _ in range(6)]
        case = *columns, torch.tensor(numbers), torch.tensor(counted)
        columns = list(joined_by_one(*case))
        for one, other in zip(columns, readable_joined_by_one(*case), strict=True):
            assert torch.equal(one, other)
        for own, number, is_counted in zip(told, numbers, counted, strict=True):
            own += [number] if is_counted else []
    assert columns[0].tolist() == [len(own) for own in told]
    assert columns[1].tolist() == pytest.approx([statistics.fmean(own) for own in told])
    spreads = [statistics.pvariance(own) * len(own) for own in told]
    assert columns[2].tolist() == pytest.approx(spreads, abs=1e-6)


def test_the_kernel_takes_float32() -> None:
    assert fast.serves(torch.zeros(2)) and not fast.serves(torch.zeros(2).double())
