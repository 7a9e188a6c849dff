"""Attention of a block and the sums of its weights: kernel and torch against plain loops."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from larder.ops import (
    BlockAttention,
    BlockWork,
    block_attention,
    c_library,
    largest_weights,
    summed_weights,
)
from references.ops import columns as loop

needs_kernel = pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")
SCALING = 0.4
SIZES = st.tuples(
    st.integers(0, 2**31),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),  # entries of each head
    st.integers(1, 3),  # query heads of a group
    st.integers(1, 21),  # queries
    st.sampled_from([2, 6, 16, 34]),  # head size
    st.booleans(),  # biases
)


class Case:
    """Ragged heads with slack between them, and a block of new tokens."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        seed, lengths, group_len, query_len, dim, is_biased = size
        torch.manual_seed(seed)
        rows = sum(lengths) + 2 * len(lengths)
        self.starts = torch.tensor([sum(lengths[:h]) + 2 * h for h in range(len(lengths))])
        self.lengths = torch.tensor(lengths)
        self.keys, self.values = torch.randn(2, rows, dim).to(dtype)
        self.new = torch.randn(2, len(lengths), query_len, dim).to(dtype)
        self.queries = torch.randn(len(lengths) * group_len, query_len, dim).to(dtype)
        self.bias = torch.randn(rows) if is_biased else None

    @property
    def entries(self) -> int:
        return int(self.lengths.sum()) + self.new.shape[1] * self.new.shape[2]

    @property
    def limits(self) -> Tensor:
        return self.lengths[:, None] + 1 + torch.arange(self.queries.shape[1])

    def block(self, sums: Tensor | None = None) -> BlockAttention:
        stored = self.keys, self.values, self.starts, self.lengths
        return BlockAttention(self.queries, *stored, *self.new, SCALING, self.bias, sums)

    def by_kernel(self, sums: Tensor | None, attends: bool = True) -> tuple[Tensor, Tensor]:
        return BlockWork(self.block(sums), attends).run()

    def heads(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Keys, values and biases of each head, the new tokens behind the stored entries."""
        heads = []
        for h, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            own = slice(int(start), int(start + length))
            bias = torch.zeros(int(length) + self.new.shape[2])
            if self.bias is not None:
                bias[: int(length)] = self.bias[own]
            sides = [
                torch.cat([stored[own], new[h]])
                for stored, new in zip((self.keys, self.values), self.new, strict=True)
            ]
            heads.append((*sides, bias))
        return heads

    def expected(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of each query, one after the other."""
        outs, lses = torch.zeros(self.queries.shape), torch.zeros(self.queries.shape[:2])
        group_len = len(self.queries) // len(self.lengths)
        for h, (keys, values, bias) in enumerate(self.heads()):
            for q, seen in enumerate(self.limits[h].tolist()):
                for head in range(h * group_len, (h + 1) * group_len):
                    query = self.queries[head, q].double()
                    logits = keys[:seen].double() @ query * SCALING + bias[:seen]
                    lses[head, q] = logits.logsumexp(0)
                    outs[head, q] = logits.softmax(0) @ values[:seen].double()
        return outs, lses

    def expected_sums(self) -> Tensor:
        packed = [keys for keys, _, _ in self.heads()]
        lengths = torch.tensor([len(keys) for keys in packed])
        indices = torch.cat([torch.arange(len(keys)) for keys in packed])
        sums = []
        for h, (keys, _, bias) in enumerate(self.heads()):
            group_len = len(self.queries) // len(self.lengths)
            queries = self.queries[h * group_len : (h + 1) * group_len]
            own = torch.tensor([0]), lengths[h : h + 1]
            positions = self.limits[h] - 1, indices[: len(keys)] * 0 + torch.arange(len(keys))
            sums.append(loop.columns(queries, keys, *own, SCALING, "sum", "sum", positions, bias))
        return torch.cat(sums)


@needs_kernel
@settings(max_examples=40)
@given(SIZES, st.sampled_from([torch.float32, torch.bfloat16]))
def test_kernel_equals_its_references(size: Any, dtype: torch.dtype) -> None:
    case = Case(size, dtype)
    sums = torch.empty(case.entries)
    out, lse = case.by_kernel(sums)
    expected, expected_lse = case.expected()
    # Weights are rounded to bfloat16 before they are multiplied by values.
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert torch.allclose(out, expected, tolerance, tolerance)
    assert torch.allclose(lse, expected_lse, 1e-5, 1e-4)
    assert torch.allclose(sums, case.expected_sums(), 1e-4, 1e-5)


@settings(max_examples=20)
@given(SIZES)
def test_torch_weight_sums_equal_their_reference(size: Any) -> None:
    case = Case(size, torch.float32)
    assert torch.allclose(summed_weights(case.block()), case.expected_sums(), 1e-4, 1e-5)


@pytest.mark.parametrize("kernel", ["ours", "torch's", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_implementations_agree(
    kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "none":
        monkeypatch.setattr(block_attention, "supports", lambda *inputs: False)
    monkeypatch.setattr(block_attention, "is_faster", lambda *kind: kernel == "ours")
    case = Case((0, [37, 0, 20], 2, 33, 16, True), dtype)
    sums = torch.empty(case.entries)
    out, lse = case.block(sums)()
    expected, expected_lse = case.expected()
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert torch.allclose(out, expected, tolerance, tolerance)
    assert torch.allclose(lse, expected_lse, 1e-5, 1e-4)
    assert torch.allclose(sums, case.expected_sums(), 1e-4, 1e-5)


@needs_kernel
def test_results_are_bitwise_independent_of_threads() -> None:
    """Many tiles, of several widths."""
    case = Case((3, [900, 1500], 3, 150, 64, False), torch.bfloat16)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sums = torch.empty(case.entries)
            results.append((*case.by_kernel(sums), sums))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_kernel
def test_column_sums_alone_equal_those_with_attention() -> None:
    case = Case((5, [60, 33], 2, 40, 8, True), torch.bfloat16)
    beside, alone = torch.empty(case.entries), torch.empty(case.entries)
    case.by_kernel(beside)
    case.by_kernel(alone, attends=False)
    assert torch.equal(beside, alone)


@needs_kernel
def test_block_without_queries_ends_with_sums_of_zero() -> None:
    """Each head waits for the one whose storage it takes."""
    case = Case((6, [60, 33, 70, 5], 2, 0, 16, True), torch.float32)
    sums = torch.full((case.entries,), torch.nan)
    run = Thread(target=case.by_kernel, args=(sums,), daemon=True)
    run.start()
    run.join(60)
    assert not run.is_alive() and not sums.any()


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(SIZES)
@settings(max_examples=40, deadline=None)
def test_largest_weights_equal_the_loop(dtype: torch.dtype, size: Any) -> None:
    case = Case(size, dtype)
    stored = case.starts, case.lengths
    by_kernel = largest_weights(case.queries, case.keys, *stored, SCALING, case.bias)
    heads = case.queries.float().unflatten(0, (len(case.lengths), -1))
    expected = []
    for group, start, length in zip(heads, *map(Tensor.tolist, stored), strict=True):
        logits = group @ case.keys[start : start + length].float().T * SCALING
        if case.bias is not None:
            logits += case.bias[start : start + length]
        expected.append(logits.softmax(-1).amax((0, 1)))
    torch.testing.assert_close(by_kernel, torch.cat(expected), rtol=2e-5, atol=1e-7)


@needs_kernel
def test_largest_weights_are_those_of_any_number_of_threads() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(6, 300, 16), torch.randn(900, 16)
    stored = torch.tensor([0, 450]), torch.tensor([440, 450])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = largest_weights(queries, keys, *stored, SCALING)
        torch.set_num_threads(2)
        assert torch.equal(largest_weights(queries, keys, *stored, SCALING), alone)
    finally:
        torch.set_num_threads(threads)


@needs_kernel
@pytest.mark.parametrize("query", [0, 40])
def test_nan_of_a_query_stays_in_the_largest_weights(query: int) -> None:
    queries, keys = torch.randn(2, 41, 4), torch.randn(50, 4)
    queries[1, query] = torch.nan
    stored = torch.tensor([0]), torch.tensor([50])
    assert largest_weights(queries, keys, *stored, SCALING).isnan().all()
