"""Column statistics equal the obvious loop, for any chunk, within bounded memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from column_statistics import STATISTICS, columns
from larder.core import BadParameter
from larder.ops import GroupReduction
from references.ops import columns as loop
from tensor_memory import LargestTensor

SCALING = 0.4


def case(seed: int, lengths: list[int], group_len: int, query_len: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.tensor([sum(lengths[:h]) + 2 * h for h in range(len(lengths))])
    keys = torch.randn(sum(lengths) + 2 * len(lengths), 6, generator=generator)
    queries = torch.randn(len(lengths) * group_len, query_len, 6, generator=generator)
    return queries, keys, starts, torch.tensor(lengths)


@settings(max_examples=40)
@given(
    st.integers(0, 2**31),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 7),
    st.integers(1, 9),
    st.sampled_from(sorted(STATISTICS)),
    st.sampled_from(list(GroupReduction)),
    st.booleans(),
    st.booleans(),
)
def test_columns_equal_their_reference_for_any_chunk(
    seed, lengths, group_len, query_len, chunk, statistic, group, causal, biased
):
    queries, keys, starts, owned = case(seed, lengths, group_len, query_len)
    positions, named = None, {}
    if causal:
        # From below the first key, so that some queries see nothing, to above the last.
        query_positions = torch.arange(query_len) * 2 - 1
        key_positions = torch.cat([torch.arange(length) for length in lengths])
        positions = (query_positions, key_positions)
        named = {"query_positions": query_positions, "key_positions": key_positions}
    bias = torch.randn(len(keys), generator=torch.Generator().manual_seed(seed)) if biased else None
    inputs = queries, keys, starts, owned, SCALING
    result = columns(statistic, *inputs, group=group, chunk=chunk, bias=bias, **named)
    expected = loop.columns(*inputs, statistic, group.value, positions, bias)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 8])
def test_memory_is_bounded_by_the_chunk(chunk):
    queries, keys, starts, owned = case(0, [500, 20], 2, 50)
    with LargestTensor() as largest:
        for statistic in STATISTICS:
            inputs = queries, keys, starts, owned, SCALING
            columns(statistic, *inputs, group=GroupReduction.MAX, chunk=chunk)
    two_blocks = 2 * 2 * chunk * 500
    assert largest.numbers <= max(two_blocks, keys.numel(), queries.numel())


def test_memory_check_detects_a_whole_matrix():
    queries, keys, starts, owned = case(0, [500, 20], 2, 400)
    with LargestTensor() as largest:
        columns("max", queries, keys, starts, owned, SCALING, group=GroupReduction.MAX, chunk=400)
    assert largest.numbers >= 2 * 400 * 500


def test_columns_of_large_logits_and_bfloat16_keys_equal_the_reference():
    queries, keys, starts, owned = case(3, [9, 4], 2, 5)
    stored = keys.bfloat16()
    result = columns("max", queries * 1e4, stored, starts, owned, SCALING, group=GroupReduction.MAX)
    expected = loop.columns(queries * 1e4, stored, starts, owned, SCALING, "max", "max")
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def test_no_queries_give_zero_statistics():
    queries, keys, starts, owned = case(0, [5, 3], 2, 0)
    for statistic in STATISTICS:
        inputs = queries, keys, starts, owned, SCALING
        assert columns(statistic, *inputs, group=GroupReduction.MAX).tolist() == [0.0] * 8


def test_partial_positions_and_empty_chunks_are_refused():
    inputs = case(0, [5], 1, 2)
    with pytest.raises(BadParameter, match="given together"):
        columns("max", *inputs, SCALING, group=GroupReduction.MAX, query_positions=torch.arange(2))
    with pytest.raises(BadParameter, match="got 0"):
        columns("sum", *inputs, SCALING, group=GroupReduction.SUM, chunk=0)
