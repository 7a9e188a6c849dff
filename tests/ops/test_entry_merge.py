"""Thresholds, weights and sums of folds: both forms have the same bits and equal the loop."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

from larder.ops import entry_merge
from larder.ops.cpu import entry_merge as fast
from references.ops import folding as loop
from without_kernels import reference


@pytest.fixture(params=["C", pytest.param("numba", marks=pytest.mark.slow)])
def compiled(request, monkeypatch) -> None:
    """Kernels in C, and those of numba, which are used where no C compiler was found."""
    if request.param == "numba":
        monkeypatch.setattr(fast, "c_library", lambda: None)


def bits(numbers: torch.Tensor) -> list[int]:
    return numbers.view(torch.int32).flatten().tolist()


@pytest.mark.parametrize("seed", range(8))
def test_running_means_equal_the_reference(seed) -> None:
    source = Random(seed)
    groups = torch.tensor([source.choice([0, 1, 1, 3]) for _ in range(seed)], dtype=torch.int64)
    numbers = torch.tensor([source.uniform(-1, 1) for _ in range(seed)], dtype=torch.float32)
    if seed == 5:
        numbers[2] = math.nan
    before = torch.tensor([0.5, source.uniform(-1, 1), 0.25, math.nan, math.nan])
    arguments = numbers, groups, before, 0.7
    results = [
        form(*arguments) for form in (reference(entry_merge.updated_means), fast.updated_means)
    ]
    expected = loop.followed_means(numbers.tolist(), groups.tolist(), before.tolist(), 0.7)
    assert bits(results[0]) == bits(results[1])
    assert results[0].tolist() == pytest.approx(expected, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("seed", range(6))
def test_weights_equal_the_reference(seed, compiled) -> None:
    source, count = Random(seed), 2 * seed
    sources = list(range(10, 10 + count))
    targets = [source.choice([9, 2, 4]) for _ in sources]
    given, counted = ([source.uniform(0, 3) for _ in sources] for _ in range(2))
    parts = torch.tensor(sources).long(), torch.tensor(targets).long()
    numbers = torch.tensor(given), torch.tensor(counted)
    results = [
        form(*parts, *numbers, math.e)
        for form in (reference(entry_merge.normalized_folds), fast.normalized_folds)
    ]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    got = [part.tolist() for part in results[1]]
    expected = loop.weighed(sources, targets, given, counted, math.e)
    assert list(zip(got[0], got[1], strict=True)) == [fold[:2] for fold in expected]
    assert got[2] == pytest.approx([fold[2] for fold in expected])


@pytest.mark.parametrize("seed", range(8))
def test_similarity_threshold_equals_its_reference(seed) -> None:
    source, count = Random(seed), 2 * seed
    heads = sorted(source.choice([0, 1, 3]) for _ in range(count))
    targets = [source.choice([-1, 4 * head, 4 * head + 1]) for head in heads]
    likeness = torch.tensor([source.uniform(-1, 1) for _ in heads], dtype=torch.float32)
    given, before = likeness + 2, torch.tensor([math.nan, 0.5, -0.5, -0.5])
    parts = (torch.tensor(part).long() for part in (range(20, 20 + count), targets, heads))
    arguments = *parts, likeness, given, math.e, before, 0.7, 0.125
    (tau, folds), (other, others) = (
        form(*arguments)
        for form in (reference(entry_merge.thresholded_folds), fast.thresholded_folds)
    )
    assert bits(tau) == bits(other)
    assert all(torch.equal(*pair) for pair in zip(folds, others, strict=True))
    found = [index for index, target in enumerate(targets) if target >= 0]
    numbers = likeness.tolist()
    arguments = [numbers[index] for index in found], [heads[index] for index in found]
    taus = loop.followed_means(*arguments, before.tolist(), 0.7)
    assert other.tolist() == pytest.approx(taus, abs=1e-6, nan_ok=True)
    alike = [index for index in found if numbers[index] >= taus[heads[index]] - 0.125]
    shares = [numbers[index] + 2 for index in alike]
    arguments = [20 + index for index in alike], [targets[index] for index in alike]
    expected = loop.weighed(*arguments, shares, shares, math.e)
    assert others[2].tolist() == pytest.approx([fold[2] for fold in expected])
    assert list(zip(*(part.tolist() for part in others[:2]), strict=True)) == [
        fold[:2] for fold in expected
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_rows_equal_the_reference(dtype, seed) -> None:
    source, count = Random(seed), 3 * seed
    lengths = torch.tensor([4, 0, 5, 3])
    starts = torch.tensor([1, 6, 7, 15])
    keys, values = torch.randn(2, 20, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
    sources, targets = ([source.randrange(12) for _ in range(count)] for _ in range(2))
    weights = [[source.uniform(-2, 2) for _ in range(count)] for _ in range(2)]
    folds = torch.tensor(sources).long(), torch.tensor(targets).long(), *map(torch.tensor, weights)
    arguments = keys, values, starts, lengths, *folds
    forms = (reference(entry_merge.weighted_sums), fast.weighted_sums)
    results = [form(*arguments) for form in forms]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    rows = [s + i for s, n in zip(starts.tolist(), lengths.tolist(), strict=True) for i in range(n)]
    for stored, own, got in zip((keys, values), weights, results[1][1:], strict=True):
        if sources:
            expected = loop.weighted_sums(stored[rows].tolist(), sources, targets, own)
            assert results[1][0].tolist() == list(expected)
            torch.testing.assert_close(got, torch.tensor(list(expected.values())))


def test_merge_kernels_support_few_folds_of_contiguous_rows() -> None:
    few, many = torch.zeros(3), torch.zeros(fast.MAX_FOLDS + 1)
    assert fast.supports(few) and not fast.supports(many) and not fast.supports(few.double())
    rows = torch.zeros(6, 4)
    assert fast.supports_rows(rows, rows, 3) and not fast.supports_rows(rows, rows, len(many))
    assert not fast.supports_rows(rows.half(), rows.half(), 3)
    assert not fast.supports_rows(rows.T, rows, 3) and not fast.supports_rows(rows, rows.T, 3)


@pytest.mark.parametrize("seed", range(6))
def test_values_are_merged_into_following_entries(seed, compiled) -> None:
    source, lengths, starts, window = Random(seed), [7, 1, 0, 5], [2, 9, 11, 12], 3
    mass = torch.tensor([source.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(18)])
    keep = [source.random() < 0.6 for _ in range(13)]
    keep[12] = True
    kept = torch.tensor([index for index in range(13) if keep[index]])
    gone = torch.tensor([index for index in range(13) if not keep[index]])
    drawn = torch.rand(len(gone) * (seed % 2), generator=torch.Generator().manual_seed(seed))
    edges = [0, 7, 8, 8, 13]
    spans = list(zip(edges, edges[1:], strict=False))
    counts = tuple(sum(keep[start:stop]) for start, stop in spans)
    held = mass, torch.tensor(starts), torch.tensor(lengths)
    arguments = *held, kept, counts, gone, window, drawn
    results = [
        form(*arguments) for form in (reference(entry_merge.spread_folds), fast.spread_folds)
    ]
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    rows = [start + index for start, n in zip(starts, lengths, strict=True) for index in range(n)]
    arguments = [float(mass[row]) for row in rows], spans, keep, window, drawn.tolist()
    sources, targets, of_keys, of_values = (part.tolist() for part in results[1])
    expected = loop.spread_folds(*arguments)
    assert list(zip(sources, targets, strict=True)) == [fold[:2] for fold in expected]
    assert of_keys == [float(source == target) for source, target, _ in expected]
    assert of_values == pytest.approx([fold[2] for fold in expected])
