"""Moments of numbers of which one more comes: both forms have the same bits and equal the loop."""

from __future__ import annotations

import statistics
from random import Random

import pytest
import torch

from larder.ops import added_moments, variance_boosted_means
from larder.ops.cpu import moments as fast
from without_kernels import reference


def test_both_forms_equal_the_moments_of_all_numbers() -> None:
    source, columns = Random(3), [torch.zeros(6)] * 3
    result: list[list[float]] = [[] for _ in range(6)]
    for _ in range(7):
        counted = [index == 0 or source.random() < 0.6 for index in range(6)]
        numbers = [source.uniform(0, 1) for _ in range(6)]
        arguments = *columns, torch.tensor(numbers), torch.tensor(counted)
        columns = list(added_moments(*arguments))
        for one, other in zip(columns, reference(added_moments)(*arguments), strict=True):
            assert torch.equal(one, other)
        for own, number, is_counted in zip(result, numbers, counted, strict=True):
            own += [number] if is_counted else []
    assert columns[0].tolist() == [len(own) for own in result]
    assert columns[1].tolist() == pytest.approx([statistics.fmean(own) for own in result])
    spreads = [statistics.pvariance(own) * len(own) for own in result]
    assert columns[2].tolist() == pytest.approx(spreads, abs=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_high_variance_entries_are_boosted(share: float) -> None:
    source, lengths, starts = Random(5), [4, 0, 7], [1, 6, 6]
    count, mean, spread = ([float(source.randint(1, 4)) for _ in range(14)] for _ in range(3))
    expected: list[float] = []
    for start, length in zip(starts, lengths, strict=True):
        rows = range(start, start + length)
        by_variance = sorted(rows, key=lambda row: (-spread[row] / count[row], row))
        raised = by_variance[: int(share * length)]
        expected += [mean[row] + (row in raised) for row in rows]
    arguments = *(torch.tensor(part) for part in (count, mean, spread, starts, lengths)), share
    assert variance_boosted_means(*arguments).tolist() == expected


def test_kernel_supports_float32_only() -> None:
    assert fast.supports(torch.zeros(2)) and not fast.supports(torch.zeros(2).double())
