"""The best of every head: both forms equal a sort, ties and infinities included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from larder.ops import top_masks, top_per_head
from larder.ops.cpu import topk as cpu_topk
from without_kernels import reference

levels = st.sampled_from([-torch.inf, -1.0, 0.0, 0.5, 0.5000001, 2.0, torch.inf])
heads = st.lists(st.lists(levels, max_size=9), min_size=1, max_size=4)


def by_sorting(scores: list[list[float]], count: int) -> list[int]:
    """Each head's entries from the best on, equals in order; the first `count` of them."""
    kept: list[int] = []
    first = 0
    for head in scores:
        ranked = sorted(range(len(head)), key=lambda position: (-head[position], position))
        kept += sorted(first + position for position in ranked[:count])
        first += len(head)
    return kept


@given(heads, st.integers(0, 10))
def test_both_forms_equal_a_sort(scores: list[list[float]], count: int) -> None:
    packed = torch.tensor([score for head in scores for score in head], dtype=torch.float32)
    lengths = tuple(map(len, scores))
    for form in (top_per_head, reference(top_per_head)):
        assert form(packed, lengths, count).tolist() == by_sorting(scores, count)


@given(heads, st.integers(0, 10), st.randoms(use_true_random=False))
def test_protected_entries_rank_first(scores, count, source) -> None:
    spared = [[source.random() < 0.4 for _ in head] for head in scores]
    pairs = [
        list(zip(head, marks, strict=True)) for head, marks in zip(scores, spared, strict=True)
    ]
    raised = [[torch.inf if mark else score for score, mark in head] for head in pairs]
    packed = torch.tensor([score for head in scores for score in head], dtype=torch.float32)
    marks = torch.tensor([mark for head in spared for mark in head], dtype=torch.bool)
    for form in (top_per_head, reference(top_per_head)):
        kept = form(packed, tuple(map(len, scores)), count, marks)
        assert kept.tolist() == by_sorting(raised, count)


def numba_masks(scores: torch.Tensor, count: int) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_topk, "c_library", lambda: None)
        return top_masks(scores, count)


MASKS = (top_masks, reference(top_masks), numba_masks)
near = st.sampled_from([0.25, 0.25 + 2**-24, 0.25 + 2**-23]) | st.floats(width=32, allow_nan=False)


@pytest.mark.extended
@given(
    st.lists(st.tuples(levels | near, levels | near), min_size=1, max_size=12), st.integers(0, 13)
)
def test_both_masks_equal_a_sort(pairs: list[tuple[float, float]], count: int) -> None:
    rows = [[pair[row] for pair in pairs] for row in range(2)]
    for form in MASKS:
        marks = form(torch.tensor(rows), count)
        assert torch.nonzero(marks.flatten()).flatten().tolist() == by_sorting(rows, count)


def test_signed_zeros_are_equal() -> None:
    for form in MASKS:
        assert form(torch.tensor([[-0.0, 0.0, -1.0, 0.0]]), 2).tolist() == [
            [True, True] + [False] * 2
        ]


def test_counting_kernel_supports_float32_rows_and_partial_counts() -> None:
    rows = torch.zeros(2, 4)
    assert cpu_topk.supports(rows, 3) and not cpu_topk.supports(rows.double(), 3)
    assert not cpu_topk.supports(rows, 0) and not cpu_topk.supports(rows, 4)


@pytest.mark.parametrize("gone", [0, 1, cpu_topk.MAX_REJECTED, cpu_topk.MAX_REJECTED + 1])
def test_kernel_is_used_for_few_evictions(gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    kernel = cpu_topk.top_per_head

    def counted(*args: object) -> torch.Tensor:
        taken.append(1)
        return kernel(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu_topk, "top_per_head", counted)
    top_per_head(torch.rand(40), (20, 20), 20 - gone)
    assert len(taken) == (gone <= cpu_topk.MAX_REJECTED)


def test_count_below_zero_keeps_nothing() -> None:
    assert top_per_head(torch.rand(6), (3, 3), -1).tolist() == []


@pytest.mark.parametrize("gone", range(1, cpu_topk.MAX_REJECTED + 1))
def test_ties_evict_the_latest(gone: int) -> None:
    for form in (cpu_topk.top_per_head, reference(top_per_head)):
        kept = form(torch.tensor([0.5] * 6 + [0.0] * 6), (6, 6), 6 - gone).tolist()
        assert kept == [*range(6 - gone), *range(6, 12 - gone)]
