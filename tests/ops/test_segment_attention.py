"""Blocks and decode steps in one call: the bits that each has alone, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, Decoder, batch_segment, wrap_model
from larder.ops import (
    BlockAttention,
    BlockWork,
    PassAttention,
    StepStorage,
    StepWork,
    attend_segments,
    block_attention,
    can_join,
)
from larder.ops.cpu import segment_attention
from model_runs import some_ids
from tiny_models import tiny

needs_kernel = pytest.mark.skipif(not can_join(), reason="the C kernels were not compiled")
HEAD_DIM, SLACK = 16, 2

# Seed, entries of each head, query heads of a group, queries, whether there are sums and biases.
BLOCKS = st.tuples(
    st.integers(0, 2**31),
    st.lists(st.integers(0, 90), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 150),
    st.booleans(),
)
STEPS = st.lists(st.lists(st.integers(0, 700), min_size=2, max_size=2), max_size=3)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def layout_of(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """First rows and lengths of heads with slack behind each."""
    starts = [sum(lengths[:head]) + SLACK * head for head in range(len(lengths))]
    return torch.tensor(starts), torch.tensor(lengths)


def block_of(size: Any, dtype: torch.dtype) -> tuple[BlockWork, Tensor | None]:
    """Block over random entries, and its output buffer for sums."""
    seed, lengths, group_len, count, has_more = size
    source, heads = torch.Generator().manual_seed(seed), len(lengths)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, HEAD_DIM, generator=source).to(dtype)

    stored = sum(lengths) + SLACK * heads
    sums = torch.full((sum(lengths) + heads * count,), torch.nan) if has_more else None
    bias = torch.randn(stored, generator=source) if has_more else None
    sides, new = (random(stored), random(stored)), (random(heads, count), random(heads, count))
    queries = random(heads * group_len, count)
    block = BlockAttention(queries, *sides, *layout_of(lengths), *new, 0.4, bias, sums)
    return BlockWork(block), sums


def step_of(rows: list[list[int]], dtype: torch.dtype) -> tuple[StepWork, list[StepStorage]]:
    """Tokens of several sequences with two kv heads of two query heads."""
    source, storages = torch.Generator().manual_seed(len(rows)), list[StepStorage]()
    for lengths in rows:
        count = sum(lengths) + SLACK * len(lengths)
        keys, values = torch.randn(2, count, HEAD_DIM, generator=source).to(dtype)
        nothing = torch.zeros(count, dtype=torch.int32), torch.empty(0, count)
        logits = torch.zeros(2, count)
        storages.append(StepStorage(keys, values, *nothing, *layout_of(lengths), None, logits))
    queries, keys, values = (
        torch.randn(heads, len(rows), HEAD_DIM, generator=source).to(dtype) for heads in (4, 2, 2)
    )
    return StepWork(queries, keys, values, [7] * len(rows), storages, 0.4), storages


@needs_kernel
@settings(max_examples=40)
@given(
    st.lists(BLOCKS, min_size=1, max_size=4),
    STEPS,
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_call_for_all_segments_equals_one_call_each_bitwise(sizes, rows, threads, dtype) -> None:
    joint, alone = ([block_of(size, dtype) for size in sizes] for _ in range(2))
    steps = [step_of(rows, dtype) if rows else None for _ in range(2)]
    for work, _ in alone:
        work.run()
    if steps[1] is not None:
        steps[1][0].run()
    with torch_threads(threads):
        for work, _ in joint:
            work.call.threads = threads
        attend_segments([work for work, _ in joint], None if steps[0] is None else steps[0][0])
    for (own, sums), (other, expected) in zip(joint, alone, strict=True):
        assert all(map(torch.equal, own.state, other.state))
        assert sums is None or (torch.equal(sums, expected) and not sums.isnan().any())
    if steps[0] is not None and steps[1] is not None:
        (own, storages), (other, others) = steps
        assert all(map(torch.equal, own.state, other.state))
        for one, two in zip(storages, others, strict=True):
            assert all(
                torch.equal(a, b) for a, b in zip(one, two, strict=True) if type(a) is Tensor
            )


@needs_kernel
@pytest.mark.parametrize(("blocks", "step", "expected"), [(1, 3, 3), (2, 1, 2)])
def test_call_takes_the_threads_of_its_largest_part(monkeypatch, blocks, step, expected):
    """A short block beside many steps does not leave them to few threads."""
    seen = list[int]()

    class Library:
        @staticmethod
        def larder_attend_segments(call: Any) -> int:
            seen.append(call._obj.threads)
            return 0

    block, _ = block_of((0, [5], 1, 40, False), torch.float32)
    work, _ = step_of([[3, 4]], torch.float32)
    block.call.threads, work.call.threads = blocks, step
    monkeypatch.setattr(segment_attention, "c_library", Library)
    attend_segments([block], work)
    assert seen == [expected]


@pytest.fixture
def joint_calls(monkeypatch) -> list[tuple[int, int]]:
    """Blocks and decode steps of each call for several segments, where the kernel is taken."""
    seen = list[tuple[int, int]]()

    def attend(blocks: list[BlockWork], step: StepWork | None) -> None:
        seen.append((len(blocks), 0 if step is None else step.batch_len))
        attend_segments(blocks, step)

    class RecordedPass(PassAttention):
        def __init__(self, rows: NDArray[np.int64], widths: Sequence[int]) -> None:
            super().__init__(rows, widths)
            self._steps = sum(width == 1 for width in widths)
            self._blocks = len(widths) - self._steps

        def attend(self, *sides: Any) -> Tensor:
            if self._blocks + self._steps > 1:
                seen.append((self._blocks, self._steps))
            return super().attend(*sides)

    choose_kernel(monkeypatch, True)
    monkeypatch.setattr(batch_segment, "attend_segments", attend)
    monkeypatch.setattr(batch_segment, "PassAttention", RecordedPass)
    return seen


def choose_kernel(monkeypatch: pytest.MonkeyPatch, is_faster: bool) -> None:
    for module in (block_attention, batch_segment):
        monkeypatch.setattr(module, "is_faster", lambda *kind: is_faster)


def logits_of(
    decoder: Decoder, form: str, lengths: list[list[int]], together: bool
) -> list[Tensor]:
    """Logits of a last pass over sequences that have read something before."""
    caches = [SequenceCache(decoder.spec, form) for _ in lengths]
    for number, (cache, (before, _)) in enumerate(zip(caches, lengths, strict=True)):
        ids = some_ids(before, seed=number)
        decoder.forward_logits([BatchSegment(cache, ids)], Mode.APPEND, [before - 1])
    last = [
        BatchSegment(cache, some_ids(count, seed=9 + number))
        for number, (cache, (_, count)) in enumerate(zip(caches, lengths, strict=True))
    ]
    ends = torch.tensor([count for _, count in lengths]).cumsum(0) - 1
    if together:
        return list(decoder.forward_logits(last, Mode.APPEND, ends.tolist()))
    alone = [decoder.forward_logits([each], Mode.APPEND, [len(each.ids) - 1])[0] for each in last]
    return alone


@needs_kernel
@pytest.mark.parametrize("form", ["dense", "ragged"])
@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([1, 40, 1, 33], (2, 2)),
        ([50, 33], (2, 0)),
        ([1, 1, 64], (1, 2)),
        ([1, 9, 40], (1, 1)),  # too few tokens for a block: a call of its own
    ],
)
def test_pass_of_blocks_and_steps_makes_one_call_a_layer(form, counts, expected, joint_calls):
    decoder = wrap_model(tiny("llama"))
    lengths = [[30 + 7 * number, count] for number, count in enumerate(counts)]
    got = logits_of(decoder, form, lengths, together=True)
    assert joint_calls == [expected] * len(decoder.spec.layers)
    joint_calls.clear()
    alone = logits_of(decoder, form, lengths, together=False)
    assert joint_calls == []
    for own, other in zip(got, alone, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


@needs_kernel
def test_blocks_that_torch_attends_to_faster_keep_calls_of_their_own(joint_calls, monkeypatch):
    choose_kernel(monkeypatch, False)
    decoder = wrap_model(tiny("llama"))
    lengths = [[30, 1], [31, 40], [32, 50]]
    got = logits_of(decoder, "dense", lengths, together=True)
    assert joint_calls == []
    for own, other in zip(got, logits_of(decoder, "dense", lengths, together=False), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
