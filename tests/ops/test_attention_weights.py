"""Weights of stored rows: both forms equal the loop, and weigh as attention does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from column_statistics import columns
from larder.ops import (
    GroupReduction,
    head_weights_from_logits,
    ragged_attention,
    weights_from_logits,
)
from larder.ops.attention_weights import attention_weights
from larder.ops.cpu import attention_weights as cpu_attention_weights
from references.ops import rows as loop
from without_kernels import reference

SCALING = 0.3
FORMS = (attention_weights, reference(attention_weights))

seeds = st.integers(0, 2**31)
groups = st.sampled_from(list(GroupReduction))
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
head_lengths = st.lists(st.integers(0, 70), min_size=1, max_size=4)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def storage(
    seed: int, lengths: list[int], head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, bias, starts, lengths; around the heads lies slack full of NaN."""
    counts = torch.tensor(lengths)
    slack = torch.arange(len(lengths)) % 3 + 2
    starts = (counts + slack).cumsum(0) - counts
    keys = torch.full((int((counts + slack).sum()) + 1, head_dim), torch.nan, dtype=dtype)
    bias = torch.full((len(keys),), torch.nan)
    for h, (start, length) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        keys[start : start + length] = random(seed + h, length, head_dim, dtype=dtype)
        bias[start : start + length] = random(seed + h + 9, length)
    return keys, bias, starts, counts


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, atol=2e-6, rtol=2e-5)


@settings(max_examples=40)
@given(
    seeds,
    head_lengths,
    st.integers(1, 3),
    st.integers(0, 5),
    st.sampled_from([1, 5, 16, 40]),
    dtypes,
    groups,
    st.booleans(),
)
def test_both_forms_equal_the_reference(
    seed, lengths, group_len, query_len, head_dim, dtype, group, biased
):
    keys, bias, starts, counts = storage(seed, lengths, head_dim, dtype)
    bias = bias if biased else None
    queries = random(seed + 1, len(lengths) * group_len, query_len, head_dim, dtype=dtype)
    expected = loop.row_weights(queries, keys, starts, counts, SCALING, group.value, bias)
    for form in FORMS:
        result = form(queries, keys, starts, counts, SCALING, group=group, bias=bias)
        assert result.dtype is torch.float32
        close(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", list(GroupReduction))
def test_heads_of_many_chunks_equal_the_python_form(group, dtype):
    keys, bias, starts, counts = storage(1, [1, 4000, 0, 33, 256, 257, 700], 64, dtype)
    queries = random(2, 14, 2, 64, dtype=dtype) * 3
    for added in (None, bias):
        arguments = queries, keys, starts, counts, SCALING
        fast = attention_weights(*arguments, group=group, bias=added)
        close(fast, reference(attention_weights)(*arguments, group=group, bias=added))


@pytest.mark.parametrize("group", list(GroupReduction))
def test_results_are_bitwise_independent_of_threads(group):
    keys, bias, starts, counts = storage(3, [3000, 17, 2000], 64, torch.float32)
    arguments, before = (
        (random(4, 6, 1, 64), keys, starts, counts, SCALING),
        torch.get_num_threads(),
    )
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(attention_weights(*arguments, group=group, bias=bias))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@settings(max_examples=20)
@given(seeds, head_lengths, st.integers(1, 3), dtypes)
def test_weights_reproduce_the_attention_output(seed, lengths, query_len, dtype):
    keys, bias, starts, counts = storage(seed, lengths, 16, dtype)
    values = random(seed + 5, len(keys), 16)
    queries = random(seed + 1, len(lengths) * 2, query_len, 16, dtype=dtype)
    weights = attention_weights(
        queries, keys, starts, counts, SCALING, group=GroupReduction.SUM, bias=bias
    )
    out, _ = ragged_attention(queries, keys.float(), values, starts, counts, SCALING, bias)
    by_head = out.sum(1).unflatten(0, (-1, 2)).sum(1)  # [K, D]
    owned = zip(starts.tolist(), counts.tolist(), strict=True)
    for head, (start, length) in zip(by_head, owned, strict=True):
        own = slice(start, start + length)
        torch.testing.assert_close(weights[own] @ values[own], head, atol=3e-5, rtol=3e-5)
    assert not weights[keys.float().isnan().any(-1)].any()


@settings(max_examples=20)
@given(seeds, st.lists(st.integers(1, 5), min_size=1, max_size=40), dtypes)
def test_bias_of_log_n_equals_n_copies(seed, times, dtype):
    keys, counts = random(seed, len(times), 16, dtype=dtype), torch.tensor(times)
    queries, start = random(seed + 1, 2, 1, 16, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    repeated = keys.repeat_interleave(counts, 0)
    for form in FORMS:
        one = form(
            queries,
            keys,
            start,
            start + len(keys),
            SCALING,
            group=GroupReduction.SUM,
            bias=counts.log(),
        )
        all_ = form(
            queries, repeated, start, start + len(repeated), SCALING, group=GroupReduction.SUM
        )
        close(one, torch.stack([part.sum() for part in all_.split(times)]))


def test_missing_bias_equals_zero_bias():
    keys, bias, starts, counts = storage(1, [300, 0, 33], 16, torch.float32)
    arguments = random(2, 6, 1, 16), keys, starts, counts, SCALING
    for form in FORMS:
        zeros = form(*arguments, group=GroupReduction.MAX, bias=torch.zeros(len(bias)))
        torch.testing.assert_close(
            zeros, form(*arguments, group=GroupReduction.MAX), atol=1e-7, rtol=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_of_many_queries_equal_column_statistics(dtype):
    keys, _, starts, counts = storage(1, [30, 0, 50], 16, dtype)
    queries = random(2, 6, 64, 16, dtype=dtype)
    weights = attention_weights(queries, keys, starts, counts, SCALING, group=GroupReduction.MEAN)
    packed = torch.cat([weights[s : s + n] for s, n in zip(starts, counts, strict=True)])
    close(packed, columns("sum", queries, keys, starts, counts, SCALING, group=GroupReduction.MEAN))


@pytest.mark.parametrize("form", FORMS)
def test_large_logits_are_finite(form):
    keys, bias, starts, counts = storage(5, [600, 3], 16, torch.float32)
    queries = random(6, 4, 1, 16) * 1e4
    weights = form(queries, keys, starts, counts, SCALING, group=GroupReduction.SUM, bias=bias)
    assert weights.isfinite().all()
    torch.testing.assert_close(weights.sum(), torch.tensor(4.0))


@pytest.mark.parametrize("form", FORMS)
def test_nan_stays_in_its_own_head(form):
    keys, _, starts, counts = storage(7, [300, 41], 8, torch.float32)
    keys[starts[0] + 5] = torch.nan
    weights = form(random(8, 4, 1, 8), keys, starts, counts, SCALING, group=GroupReduction.SUM)
    assert weights[starts[0] : starts[0] + 300].isnan().all()
    assert not weights[starts[1] :].isnan().any()


@pytest.mark.parametrize("form", FORMS)
def test_empty_cache_and_no_queries_give_zeros(form):
    none = torch.zeros(2, dtype=torch.int64)
    assert form(
        random(0, 4, 1, 8), torch.zeros(0, 8), none, none, 1.0, group=GroupReduction.MAX
    ).shape == (0,)
    keys, _, starts, counts = storage(7, [300, 41], 8, torch.float32)
    for group in GroupReduction:
        assert not form(random(8, 4, 0, 8), keys, starts, counts, SCALING, group=group).any()


def test_weights_carry_no_gradient():
    keys, _, starts, counts = storage(7, [30, 4], 8, torch.float32)
    queries = random(8, 4, 1, 8).requires_grad_()
    weights = attention_weights(queries, keys, starts, counts, SCALING, group=GroupReduction.SUM)
    assert not weights.requires_grad


def test_concurrent_callers_get_their_own_results():
    def worker(seed: int) -> bool:
        keys, bias, starts, counts = storage(seed, [3000, 500], 32, torch.float32)
        arguments = random(seed, 4, 1, 32), keys, starts, counts, SCALING
        expected = reference(attention_weights)(*arguments, group=GroupReduction.SUM, bias=bias)
        return all(
            torch.allclose(
                attention_weights(*arguments, group=GroupReduction.SUM, bias=bias),
                expected,
                atol=2e-6,
            )
            for _ in range(10)
        )

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(worker, range(8)))
    finally:
        torch.set_num_threads(before)


def test_every_group_reduction_has_a_kernel_code():
    assert set(cpu_attention_weights.REDUCTION_CODES) == {group.value for group in GroupReduction}


@settings(max_examples=30)
@given(seeds, st.lists(st.integers(0, 600), min_size=1, max_size=3), st.integers(1, 3), groups)
def test_recorded_logits_give_the_same_weights(seed, lengths, group_len, group):
    keys, bias, starts, counts = storage(seed, lengths, 24, torch.float32)
    queries = random(seed + 1, len(lengths) * group_len, 1, 24)
    arguments = queries, keys, starts, counts, SCALING
    for added in (None, bias):
        logits = torch.full((group_len, len(keys)), torch.nan)
        ragged_attention(queries, keys, keys, starts, counts, SCALING, added, logits)
        weights = weights_from_logits(logits, starts, counts, group)
        close(weights, attention_weights(*arguments, group=group, bias=added))
        shares = head_weights_from_logits(logits, starts, counts)
        close(shares, reference(head_weights_from_logits)(logits, starts, counts))
        close(group.join(shares), weights)


@settings(max_examples=20)
@given(seeds, head_lengths, st.integers(1, 3), dtypes)
def test_both_forms_record_the_same_logits(seed, lengths, query_len, dtype):
    keys, bias, starts, counts = storage(seed, lengths, 16, dtype)
    queries = random(seed + 1, len(lengths) * 2, query_len, 16, dtype=dtype)
    fast, readable = (torch.full((2 * query_len, len(keys)), -7.0) for _ in range(2))
    ragged_attention(queries, keys, keys, starts, counts, SCALING, bias, fast)
    reference(ragged_attention)(queries, keys, keys, starts, counts, SCALING, bias, readable)
    close(fast, readable)
    assert (fast[:, keys.float().isnan().any(-1)] == -7.0).all()
