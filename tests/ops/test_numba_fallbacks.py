"""Kernels that numba compiles where no C kernel was: they equal those that were compiled from C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from larder.ops.cpu import attention_weights, c_library, entry_merge, removal, search, topk

pytestmark = pytest.mark.extended  # numba compiles each kernel once for this file alone
LENGTHS = (700, 0, 33, 257)
STARTS = torch.tensor([2, 702, 705, 740])
ROWS = 1000


@pytest.fixture(params=range(3))
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(request.param)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """Results of a call with C kernels and without them."""
    if c_library.c_library() is None:
        pytest.skip("the C kernels were not compiled: no C compiler was found at installation")

    def call(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        compiled = function(*args)
        with monkeypatch.context() as patch:
            for module in (attention_weights, entry_merge, removal, search, topk):
                patch.setattr(module, "c_library", lambda: None)
            return compiled, function(*args)

    return call


def kept_of(generator: torch.Generator, share: float) -> tuple[Tensor, tuple[int, ...]]:
    marks = torch.rand(sum(LENGTHS), generator=generator) < share
    return marks.nonzero().flatten(), tuple(int(part.sum()) for part in marks.split(LENGTHS))


@pytest.mark.slow  # numba compiles for longer than all other tests of this file run
@pytest.mark.parametrize("join", attention_weights.REDUCTION_CODES)
def test_attention_weights_of_numba_equal_c(both, generator, join):
    queries = torch.randn(12, 2, 40, generator=generator) * 3
    keys = torch.randn(ROWS, 40, generator=generator)
    layout = STARTS, torch.tensor(LENGTHS)
    compiled, numba = both(attention_weights.attention_weights, queries, keys, *layout, 0.3, join)
    torch.testing.assert_close(compiled, numba, rtol=1e-4, atol=1e-6)
    logits = torch.randn(3, ROWS, generator=generator) * 5
    compiled, numba = both(attention_weights.weights_from_logits, logits, *layout, join)
    torch.testing.assert_close(compiled, numba, rtol=1e-4, atol=1e-6)
    compiled, numba = both(attention_weights.head_weights_from_logits, logits, *layout)
    torch.testing.assert_close(compiled, numba, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gone", range(topk.MAX_REJECTED + 1))
def test_selection_of_numba_equals_c(both, generator, gone):
    scores = torch.randint(0, 9, (40,), generator=generator).float()
    spared = torch.rand(40, generator=generator) < 0.3
    for marks in (None, spared):
        compiled, numba = both(topk.top_per_head, scores, (20, 3, 17), 20 - gone, marks)
        assert torch.equal(compiled, numba)


@pytest.mark.parametrize("roomy", [0, 400])
def test_removal_plans_of_numba_equal_c(both, generator, roomy):
    kept, new_lengths = kept_of(generator, 0.9)
    edges = (0, 702, 703, 738, ROWS)
    args = STARTS, torch.tensor(LENGTHS), kept, new_lengths, edges, roomy
    (bad, starts, *rest), (numba_bad, numba_starts, *numba_rest) = both(removal.plan_removal, *args)
    assert (bad, rest) == (numba_bad, numba_rest) == (None, numba_rest)
    assert torch.equal(starts, numba_starts)
    invalid = kept.flip(0)
    compiled, numba = both(removal.plan_removal, *args[:2], invalid, *args[3:])
    assert compiled[0] == numba[0] == 0


@pytest.mark.extended
def test_row_moves_of_numba_equal_c(both, generator):
    stored = torch.randn(ROWS, 8, generator=generator)

    def moved(*args: Any) -> Tensor:
        tensors = [stored.clone(), stored[:, 0].clone()]
        assert removal.remove_rows(tensors, *args) is None
        return torch.cat([tensors[0].flatten(), tensors[1]])

    kept, new_lengths = kept_of(generator, 0.7)
    compiled, numba = both(moved, STARTS, torch.tensor(LENGTHS), kept, new_lengths, STARTS + 1)
    assert torch.equal(compiled, numba) and not torch.equal(
        compiled[: stored.numel()], stored.flatten()
    )


@pytest.mark.extended
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_merges_of_numba_equal_c(both, generator, dtype):
    keys, values = torch.randn(2, ROWS, 40, generator=generator).to(dtype)
    layout = STARTS, torch.tensor(LENGTHS)
    marked = torch.rand(sum(LENGTHS), generator=generator) < 0.9
    asked = torch.tensor([0, 650, 699, 700, 731, 800])
    compiled, numba = both(search.nearest_rows, keys, *layout, marked, asked)
    torch.testing.assert_close(compiled[0], numba[0])
    assert torch.equal(compiled[1], numba[1])
    heads, (likeness, nearest) = torch.tensor([0, 0, 0, 2, 2, 3]), compiled
    before = torch.tensor([0.1, torch.nan, torch.nan, 0.9])
    thresholds = heads, likeness, likeness.exp(), 2.5, before, 0.7, 1e-6
    compiled, numba = both(entry_merge.thresholded_folds, asked, nearest, *thresholds)
    torch.testing.assert_close(compiled, numba, rtol=0, atol=0, equal_nan=True)
    sources, targets, weights = compiled[1]
    folds = sources, targets, weights, weights.sqrt()
    compiled, numba = both(entry_merge.weighted_sums, keys, values, *layout, *folds)
    torch.testing.assert_close(compiled, numba, rtol=0, atol=0)
