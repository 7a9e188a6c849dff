"""Rows taken out in place: both forms equal the loop, and touch nothing that need not move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from larder.core import CacheError
from larder.ops import plan_removal, reference_remove_rows, removal, remove_rows
from references.ops import removal as loop
from tensor_memory import LargestTensor

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[bool]]]:
    """Lengths, slack behind each head, and which entries stay; runs as well as single ones."""
    heads = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, 40), min_size=heads, max_size=heads))
    slack = draw(st.lists(st.integers(0, 3), min_size=heads, max_size=heads))
    keep = []
    for length in lengths:
        share = draw(st.sampled_from([0, 1, 5, 9, 10]))
        tenths = draw(st.lists(st.integers(0, 9), min_size=length, max_size=length))
        keep.append([tenth < share for tenth in tenths])
    return lengths, slack, keep


def layout(lengths: list[int], slack: list[int]) -> tuple[Tensor, Tensor, int]:
    """Starts, lengths, and the rows of a storage with a row in front and one behind."""
    starts, rows = [], 1
    for length, free in zip(lengths, slack, strict=True):
        starts.append(rows)
        rows += length + free
    return torch.tensor(starts), torch.tensor(lengths), rows + 1


def storages(rows: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Keys, values, positions, weights and columns in which no two rows are alike."""
    numbers = torch.arange(rows)
    keys = (numbers.unsqueeze(-1) * 5 + torch.arange(5)).to(dtype)
    tensors = [keys, -keys, numbers.to(torch.int32), numbers.float() + 0.5]
    return tensors, torch.stack([numbers.float(), numbers.float() * 1000, -numbers.float()])


def plan(keep: list[list[bool]]) -> tuple[Tensor, tuple[int, ...]]:
    packed = torch.tensor([one for head in keep for one in head], dtype=torch.bool)
    return packed.nonzero().flatten(), tuple(sum(head) for head in keep)


def fast(tensors: list[Tensor], columns: Tensor, *args: Any) -> None:
    remove_rows(tensors, *args[:4], columns, *args[4:])


def readable(tensors: list[Tensor], columns: Tensor, *args: Any) -> None:
    starts, *rest = args
    *rest, new_starts = rest if len(rest) > 3 else (*rest, starts)
    assert reference_remove_rows([*tensors, *columns], starts, *rest, new_starts) is None


FORMS = (fast, readable)


@settings(max_examples=60)
@given(cases(), dtypes)
def test_both_forms_equal_the_reference(case, dtype):
    lengths, slack, keep = case
    starts, counts, rows = layout(lengths, slack)
    kept, new_lengths = plan(keep)
    for form in FORMS:
        tensors, columns = storages(rows, dtype)
        held = [*tensors, *columns]
        before = [tensor.clone() for tensor in held]
        expected = loop.remove_rows(held, starts.tolist(), lengths, kept.tolist(), new_lengths)
        form(tensors, columns, starts, counts, kept, new_lengths)
        for tensor, old, wanted in zip(held, before, expected, strict=True):
            now = torch.cat(
                [tensor[s : s + n] for s, n in zip(starts.tolist(), new_lengths, strict=True)]
            )
            assert torch.equal(now, torch.stack(wanted) if wanted else old[:0])
            outside = torch.ones(rows, dtype=torch.bool)
            for start, length in zip(starts.tolist(), lengths, strict=True):
                outside[start : start + length] = False
            assert torch.equal(tensor[outside], old[outside])


@settings(max_examples=60)
@given(cases(), st.data())
def test_kept_rows_are_moved_to_any_offset(case, data):
    lengths, slack, keep = case
    starts, counts, rows = layout(lengths, slack)
    kept, new_lengths = plan(keep)
    free = [n + s - m for n, s, m in zip(lengths, slack, new_lengths, strict=True)]
    edges = starts - torch.tensor([1, *slack[:-1]])  # the slack before a head may be taken instead
    before = data.draw(st.booleans())
    shifts = torch.tensor([data.draw(st.integers(0, most)) for most in free])
    new_starts = edges.clamp(min=1) if before else starts + shifts
    for form in FORMS:
        tensors, columns = storages(rows, torch.float32)
        held = [*tensors, *columns]
        expected = loop.remove_rows(held, starts.tolist(), lengths, kept.tolist(), new_lengths)
        form(tensors, columns, starts, counts, kept, new_lengths, new_starts)
        for tensor, wanted in zip(held, expected, strict=True):
            spans = zip(new_starts.tolist(), new_lengths, strict=True)
            now = torch.cat([tensor[start : start + n] for start, n in spans])
            assert torch.equal(now, torch.stack(wanted) if wanted else tensor[:0])


@settings(max_examples=60)
@given(cases(), st.data())
def test_shorter_side_moves(case, data):
    lengths, slack, keep = case
    starts, counts, rows = layout(lengths, slack)
    kept, new_lengths = plan(keep)
    edges, roomy = (*starts.tolist(), rows - 1), data.draw(st.integers(0, 12))
    expected, moved = starts.tolist(), 0
    for h, marks in enumerate(keep):
        up = sum(mark for index, mark in enumerate(marks) if not all(marks[:index]))
        down = sum(mark for index, mark in enumerate(marks) if not all(marks[index:]))
        wanders = slack[h] + marks.count(False) >= roomy and down < up
        expected[h] += marks.count(False) if wanders else 0
        moved += down if wanders else up
    ends = [start + held for start, held in zip(expected, new_lengths, strict=True)]
    room = min(edge - end for edge, end in zip(edges[1:], ends, strict=True))
    motion = plan_removal(starts, counts, kept, new_lengths, edges, roomy)
    assert motion.starts.tolist() == expected
    assert (motion.room, motion.rows) == (room, moved)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_storages_are_moved_with_any_threads(threads):
    lengths = [3000, 0, 1, 2000, 700]
    starts, counts, rows = layout(lengths, [5, 0, 3, 1, 0])
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(sum(lengths), generator=generator) > 0.2
    kept = keep.nonzero().flatten()
    new_lengths = tuple(int(part.sum()) for part in keep.split(lengths))
    keys = torch.randn(rows, 64, generator=generator)
    by_loop, before = keys.clone(), torch.get_num_threads()
    reference_remove_rows([by_loop], starts, counts, kept, new_lengths, starts)
    torch.set_num_threads(threads)
    try:
        remove_rows([keys], starts, counts, kept, new_lengths)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for start, count in zip(starts.tolist(), new_lengths, strict=True):
        assert torch.equal(keys[start : start + count], by_loop[start : start + count])


@pytest.mark.parametrize("form", FORMS)
def test_removal_of_nothing_or_everything_changes_no_row(form):
    starts, counts, rows = layout([4, 0, 3], [1, 2, 0])
    for kept, new_lengths in ((torch.arange(7), (4, 0, 3)), (torch.arange(0), (0, 0, 0))):
        tensors, columns = storages(rows, torch.float32)
        form(tensors, columns, starts, counts, kept, new_lengths)
        for result, before in zip(tensors, storages(rows, torch.float32)[0], strict=True):
            assert torch.equal(result, before)


def test_rows_of_non_contiguous_storage_are_removed():
    starts, counts, _ = layout([4, 3], [1, 0])
    keys = torch.arange(60.0).view(6, 10).T  # [10, 6]
    expected = keys.clone()
    expected[[2, 3, 6]] = keys[[3, 4, 7]]
    remove_rows([keys], starts, counts, torch.tensor([0, 2, 3, 5]), (3, 1))
    assert torch.equal(keys[[1, 2, 3, 6]], expected[[1, 2, 3, 6]])


def test_removing_allocates_nothing_that_grows_with_the_storage():
    keys, none = torch.randn(4000, 8), torch.zeros(1, dtype=torch.int64)
    with LargestTensor(apart=(keys,)) as seen:
        remove_rows([keys], none, none + 4000, torch.arange(1, 4000), (3999,))
    assert seen.nbytes < 1 << 15 < keys.nbytes


@pytest.mark.parametrize("form", ["fast", "readable"])
@pytest.mark.parametrize(
    ("kept", "new_lengths"),
    [
        ([1, 0], (2, 0)),
        ([0, 0], (2, 0)),
        ([0, 4], (2, 0)),
        ([3, 5], (0, 2)),
        ([-1, 2], (2, 0)),
        ([5, 7], (0, 2)),
        ([0, 1, 2], (2, 0)),
        ([0, 1], (2,)),
        ([0, 1], (3, -1)),
    ],
)
def test_invalid_kept_entries_are_refused_unchanged(form, kept, new_lengths, monkeypatch):
    if form == "readable":
        monkeypatch.setattr(removal.removal, "supports", lambda storages: False)
    starts, counts, rows = layout([4, 3], [1, 0])
    tensors, columns = storages(rows, torch.float32)
    with pytest.raises(CacheError, match="kept entries"):
        remove_rows(tensors, starts, counts, torch.tensor(kept), new_lengths, columns)
    assert torch.equal(tensors[0], storages(rows, torch.float32)[0][0])
    with pytest.raises(CacheError, match="kept entries"):
        plan_removal(starts, counts, torch.tensor(kept), new_lengths, (1, 6, 9), 0)


def test_storage_smaller_than_its_heads_is_refused():
    starts, counts, rows = layout([4, 3], [1, 0])
    tensors, columns = storages(rows - 2, torch.float32)
    with pytest.raises(CacheError, match="A storage of 8 rows cannot hold heads that end at row 9"):
        remove_rows(tensors, starts, counts, torch.tensor([0, 5]), (1, 1), columns)
