"""Nearest rows: both forms equal the loop, on any heads and marks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from larder.ops import c_library, nearest_rows
from larder.ops.cpu import search as fast
from references.ops import nearest as loop
from without_kernels import reference

AVX512, AVX512_BF16, MATRIX_UNITS = 2, 3, 4  # `enum instruction_set` of c_library.h


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    marks=st.lists(st.lists(st.booleans(), max_size=40), min_size=1, max_size=3),
    head_dim=st.sampled_from([5, 16, 600]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_every_form_equals_its_reference(seed, marks, head_dim, dtype) -> None:
    lengths = torch.tensor([len(head) for head in marks])
    starts = (lengths + 2).cumsum(0) - lengths - 2
    source = torch.Generator().manual_seed(seed)
    rows = torch.full((int((lengths + 2).sum()), head_dim), torch.nan, dtype=dtype)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        rows[start : start + length] = torch.randn(length, head_dim, generator=source).to(dtype)
    flat = [mark for head in marks for mark in head]
    marked = torch.tensor(flat, dtype=torch.bool)
    gone = torch.nonzero(~marked).flatten()
    expected = loop.nearest_rows(rows, starts.tolist(), lengths.tolist(), flat)
    for form in (nearest_rows, reference(nearest_rows), fast.nearest_rows):
        cosines, positions = form(rows, starts, lengths, marked, gone)
        assert cosines.tolist() == pytest.approx([u for u, _ in expected], abs=2e-6)
        assert positions.tolist() == [position for _, position in expected]


def test_ties_take_the_first_entry_of_the_same_head() -> None:
    rows = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [5.0, 0.0], [0.0, 1.0]])
    marked = torch.tensor([False, True, True, False, True])
    for form in (reference(nearest_rows), fast.nearest_rows):
        layout = torch.tensor([0, 3]), torch.tensor([3, 2])
        cosines, positions = form(rows, *layout, marked, torch.tensor([0, 3]))
        assert cosines.tolist() == [1.0, 0.0]
        assert positions.tolist() == [1, 4]


def test_zero_row_has_similarity_zero() -> None:
    rows = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    marked = torch.tensor([False, True])
    for form in (reference(nearest_rows), fast.nearest_rows):
        layout = torch.tensor([0]), torch.tensor([2])
        cosines, positions = form(rows, *layout, marked, torch.tensor([0]))
        assert (cosines.tolist(), positions.tolist()) == ([0.0], [1])


def test_nearest_kernel_supports_few_contiguous_rows() -> None:
    rows = torch.zeros(10, 4)
    assert fast.supports_nearest(rows, 8, 2)
    assert not fast.supports_nearest(rows, 9, 2)
    assert not fast.supports_nearest(rows.half(), 8, 2)
    assert not fast.supports_nearest(rows.T, 8, 2)


@pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")
@pytest.mark.parametrize("spread", [1.0, 1e-2, 0.0])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_search_by_dot_products_finds_what_sums_find(head_dim: int, spread: float) -> None:
    library = c_library()
    assert library is not None
    source = torch.Generator().manual_seed(head_dim)
    center = torch.randn(head_dim, generator=source)
    rows = center + spread * torch.randn(333, head_dim, generator=source)
    rows *= 10 ** torch.linspace(-6, 6, 333)[torch.randperm(333, generator=source)][:, None]
    rows[7], rows[40:60] = 0, rows[39]
    layout = torch.tensor([0, 200]), torch.tensor([190, 133])
    marked = torch.rand(323, generator=source) < 0.95
    gone = torch.nonzero(~marked).flatten()
    found = list[tuple[torch.Tensor, torch.Tensor]]()
    for limit in (AVX512, AVX512_BF16):
        library.larder_limit_instruction_set(limit)
        found.append(fast.nearest_rows(rows.bfloat16(), *layout, marked, gone))
    library.larder_limit_instruction_set(MATRIX_UNITS)
    (cosines, places), (screened, found_places) = found
    assert torch.equal(cosines, screened) and torch.equal(places, found_places)
