"""Attention over ragged and dense caches: fast forms, readable forms and the obvious loop agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from larder.ops import (
    c_library,
    causal_attention,
    chunk_sections,
    masked_attention,
    merge_attention,
    ragged_attention,
    windowed_attention,
)
from larder.ops.attention import attention
from larder.ops.cpu import decode_attention, flash_attention
from references.ops import attention as loop
from without_kernels import reference

SCALING = 0.3
FORMS = (
    ragged_attention,
    reference(ragged_attention),
    decode_attention.decode_attention,
    flash_attention.ragged,
)
# Compiled for seconds, where the C kernel does not apply.
NUMBA_FORMS = (decode_attention.numba_decode_attention,)
by_forms = pytest.mark.parametrize(
    "forms",
    [
        pytest.param(FORMS, id="forms"),
        pytest.param(NUMBA_FORMS, id="numba", marks=pytest.mark.extended),
    ],
)
by_form = pytest.mark.parametrize(
    "form", [*FORMS[1:], *(pytest.param(form, marks=pytest.mark.extended) for form in NUMBA_FORMS)]
)

group_lens = st.integers(1, 3)
query_lens = st.integers(1, 6)
head_sizes = st.sampled_from([1, 5, 16, 40])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
head_lengths = st.lists(st.integers(0, 70), min_size=1, max_size=4)
seeds = st.integers(0, 2**31)


@pytest.fixture
def compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernel that was compiled from C."""
    if c_library() is None:
        pytest.skip("the C kernels were not compiled: no C compiler was found at installation")
    return decode_attention.decode_attention


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ragged_storage(
    seed: int, lengths: list[int], head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, starts, lengths; around the heads lies slack full of NaN."""
    starts, rows = [], 3
    for h, length in enumerate(lengths):
        starts.append(rows)
        rows += length + h % 3
    keys = torch.full((rows + 2, head_dim), torch.nan, dtype=dtype)
    values = keys.clone()
    for h, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        keys[start : start + length] = random(seed + 2 * h, length, head_dim, dtype=dtype)
        values[start : start + length] = random(seed + 2 * h + 1, length, head_dim, dtype=dtype)
    return keys, values, torch.tensor(starts), torch.tensor(lengths)


def agree(result: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=tolerance, rtol=tolerance)


def tolerance(form: Callable[..., object], dtype: torch.dtype) -> float:
    """All read the same rounded inputs; only torch's kernel rounds its bfloat16 outputs again."""
    rounds = form in (ragged_attention, flash_attention.ragged) and dtype is torch.bfloat16
    return 2e-2 if rounds else 2e-5


def test_agree_detects_a_difference():
    with pytest.raises(AssertionError):
        agree((torch.tensor([1.0]),), (torch.tensor([1.001]),), 2e-5)


def bias_of(seed: int, keys: Tensor) -> Tensor:
    """One number for each stored row; NaN in the slack, as there."""
    bias = random(seed, len(keys)) * 2
    return bias.masked_fill(keys.float().isnan().any(-1), torch.nan)


@pytest.mark.extended
@settings(max_examples=40)
@given(seeds, head_lengths, group_lens, query_lens, head_sizes, dtypes)
def test_ragged_forms_equal_the_reference(seed, lengths, group_len, query_len, head_dim, dtype):
    cached = ragged_storage(seed, lengths, head_dim, dtype)
    queries = random(seed, len(lengths) * group_len, query_len, head_dim, dtype=dtype)
    expected = loop.ragged(queries, *cached, SCALING)
    for form in (*FORMS, *NUMBA_FORMS):
        result = form(queries, *cached, SCALING)
        assert result[0].dtype is result[1].dtype is torch.float32
        agree(result, expected, tolerance(form, dtype))


@by_forms
@settings(max_examples=40)
@given(seeds, head_lengths, group_lens, query_lens, head_sizes, dtypes)
def test_biased_forms_equal_the_reference(
    forms, seed, lengths, group_len, query_len, head_dim, dtype
):
    cached = ragged_storage(seed, lengths, head_dim, dtype)
    bias = bias_of(seed + 9, cached[0])
    queries = random(seed, len(lengths) * group_len, query_len, head_dim, dtype=dtype)
    expected = loop.ragged(queries, *cached, SCALING, bias)
    for form in forms:
        result = form(queries, *cached, SCALING, bias)
        agree(result, expected, tolerance(form, dtype))


@by_forms
@settings(max_examples=20)
@given(seeds, st.lists(st.integers(1, 5), min_size=1, max_size=40), query_lens, dtypes)
def test_bias_of_log_n_equals_n_copies(forms, seed, times, query_len, dtype):
    keys, values = (random(seed + side, len(times), 16, dtype=dtype) for side in (1, 2))
    queries, start = random(seed, 2, query_len, 16, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    counts = torch.tensor(times)
    repeated = keys.repeat_interleave(counts, 0), values.repeat_interleave(counts, 0)
    for form in forms:
        result = form(queries, keys, values, start, start + len(times), SCALING, counts.log())
        expected = form(queries, *repeated, start, counts.sum().view(1), SCALING)
        agree(result, expected, tolerance(form, dtype))


@by_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("query_len", [1, 64])
def test_missing_bias_equals_zero_bias(forms, query_len, dtype):
    cached = ragged_storage(1, [100, 0, 33], 16, dtype)
    queries = random(2, 6, query_len, 16, dtype=dtype)
    for form in forms:
        result = form(queries, *cached, SCALING, torch.zeros(len(cached[0])))
        agree(result, form(queries, *cached, SCALING), 1e-6)


@by_forms
def test_bias_keeps_its_precision_beside_half_precision_storage(forms):
    # In bfloat16 ln(1000) would be 6.90625 and the row would stand for 998.5 others.
    keys, start = torch.zeros(1, 16, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    queries = torch.zeros(2, 1, 16, dtype=torch.bfloat16)
    bias = torch.tensor([1000.0]).log()
    for form in forms:
        _, lse = form(queries, keys, keys, start, start + 1, SCALING, bias)
        torch.testing.assert_close(lse, bias.expand(2, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "threads"),
    [
        *((torch.float32, threads) for threads in (1, 2, 3)),
        (torch.bfloat16, 1),
        pytest.param(torch.bfloat16, 2, marks=pytest.mark.slow),  # compiles for seconds
    ],
)
def test_spans_across_heads_equal_the_python_form(dtype, threads):
    before = torch.get_num_threads()
    cached = ragged_storage(1, [1, 4000, 0, 33, 700], 64, dtype)
    queries, bias = random(2, 10, 2, 64, dtype=dtype), bias_of(3, cached[0])
    torch.set_num_threads(threads)
    try:
        result = decode_attention.decode_attention(queries, *cached, SCALING)
        biased = decode_attention.decode_attention(queries, *cached, SCALING, bias)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    agree(result, reference(ragged_attention)(queries, *cached, SCALING), 2e-5)
    agree(biased, reference(ragged_attention)(queries, *cached, SCALING, bias), 2e-5)


@pytest.mark.parametrize(
    "head_dim", [8, 24, 32, 64, 80, 96, 128, 256, 512, 513, 576, 1000, 1024, 1030]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernel_supports_any_head_size(compiled, head_dim, dtype):
    cached = ragged_storage(4, [33, 0, 1100], head_dim, dtype)
    queries, bias = random(2, 6, 2, head_dim, dtype=dtype), bias_of(3, cached[0])
    logits, expected = torch.zeros(2, 4, len(cached[0]))
    result = compiled(queries, *cached, SCALING, bias, logits)
    agree(result, reference(ragged_attention)(queries, *cached, SCALING, bias, expected), 2e-5)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_head_output_is_bitwise_independent_of_batch_and_threads(compiled):
    keys, values, starts, lengths = ragged_storage(9, [700, 3, 4000], 64, torch.bfloat16)
    queries, before = random(1, 6, 1, 64), torch.get_num_threads()
    alone = [
        compiled(
            queries[2 * h : 2 * h + 2], keys, values, starts[h : h + 1], lengths[h : h + 1], 1.0
        )
        for h in range(3)
    ]
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out, lse = compiled(queries, keys, values, starts, lengths, 1.0)
            assert torch.equal(out, torch.cat([part for part, _ in alone]))
            assert torch.equal(lse, torch.cat([part for _, part in alone]))
    finally:
        torch.set_num_threads(before)


def test_kernel_supports_few_queries_over_contiguous_supported_dtypes():
    keys, values, _, _ = ragged_storage(0, [5, 6], 16, torch.float32)
    assert decode_attention.supports(random(0, 4, 1, 16), keys, values, 2)
    assert not decode_attention.supports(random(0, 4, 1000, 16), keys, values, 2)
    assert not decode_attention.supports(random(0, 4, 1, 16), keys.half(), values.half(), 2)
    assert not decode_attention.supports(random(0, 4, 1, 16), keys.T.contiguous().T, values, 2)


@pytest.mark.parametrize("query_len", [1, 64])
def test_gradients_equal_the_python_form(query_len):
    cached = ragged_storage(3, [9, 4], 8, torch.float32)
    queries = random(4, 4, query_len, 8).requires_grad_()
    ragged_attention(queries, *cached, SCALING)[0].sum().backward()
    again = queries.detach().clone().requires_grad_()
    reference(ragged_attention)(again, *cached, SCALING)[0].sum().backward()
    torch.testing.assert_close(queries.grad, again.grad)


def test_bias_that_needs_a_gradient_gets_one():
    cached = ragged_storage(3, [9, 4], 8, torch.float32)
    bias = torch.zeros(len(cached[0])).requires_grad_()
    ragged_attention(random(4, 4, 1, 8), *cached, SCALING, bias)[0].sum().backward()
    assert bias.grad is not None and bias.grad.any()


@by_form
def test_large_logits_are_finite(form):
    cached = ragged_storage(5, [50, 3], 16, torch.float32)
    queries = random(6, 4, 3, 16) * 1e4
    result = form(queries, *cached, SCALING)
    assert result[0].isfinite().all() and result[1].isfinite().all()
    agree(result, loop.ragged(queries, *cached, SCALING), 1e-4)


@by_form
def test_query_head_uses_the_kv_head_of_its_group(form):
    keys, starts, lengths = torch.zeros(3, 4), torch.arange(3), torch.ones(3, dtype=torch.int64)
    values = torch.arange(3.0).unsqueeze(-1).expand(3, 4).contiguous()
    out, _ = form(torch.zeros(6, 1, 4), keys, values, starts, lengths, SCALING)
    assert out[:, 0, 0].tolist() == [0, 0, 1, 1, 2, 2]


@by_form
def test_nan_stays_in_its_own_head(form):
    keys, values, starts, lengths = ragged_storage(7, [40, 41], 8, torch.float32)
    keys[starts[0] + 5] = torch.nan
    out, lse = form(random(8, 4, 1, 8), keys, values, starts, lengths, SCALING)
    assert out[:2].isnan().all() and lse[:2].isnan().all()
    assert not out[2:].isnan().any() and not lse[2:].isnan().any()


def test_empty_caches_give_zero_and_minus_infinity():
    none = torch.zeros(2, dtype=torch.int64)
    for query_len in (1, 64):
        queries = random(0, 4, query_len, 8)
        for form in (ragged_attention, reference(ragged_attention)):
            out, lse = form(queries, torch.zeros(0, 8), torch.zeros(0, 8), none, none, SCALING)
            assert not out.any() and lse.isneginf().all()
    out, lse = attention(random(0, 2, 3, 8), torch.zeros(0, 8), torch.zeros(0, 8), SCALING)
    assert not out.any() and lse.isneginf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_hidden_by_their_bias_are_as_if_absent(compiled, dtype):
    lengths = [700, 650, 40]
    keys, values, starts, owned = ragged_storage(0, lengths, 16, dtype)
    bias, is_hidden = bias_of(1, keys), random(2, len(keys)) < 0
    is_hidden[int(starts[0]) + 90 : int(starts[0]) + 640] = True  # blocks, and a part
    is_hidden[int(starts[2]) :] = True  # a head
    queries, logits = random(3, 6, 1, 16), torch.zeros(2, len(keys))
    masked = bias.masked_fill(is_hidden, -1e30)
    out, lse = compiled(queries, keys, values, starts, owned, SCALING, masked, logits)
    rows = [
        torch.arange(start, start + n) for start, n in zip(starts.tolist(), lengths, strict=True)
    ]
    kept = [own[~is_hidden[own]] for own in rows]
    left, packed = torch.tensor([len(own) for own in kept]), torch.cat(kept)
    rest = left.cumsum(0) - left, left, SCALING, bias[packed]
    alone, alone_lse = compiled(queries, keys[packed], values[packed], *rest)
    agree((out, lse[:4]), (alone, alone_lse[:4]), 2e-5)
    assert bool((lse[4:] == -1e30).all()) and bool(alone_lse[4:].isneginf().all())
    rows_alone = compiled(queries, keys, values, starts, owned, SCALING, masked)
    agree(rows_alone, (alone, alone_lse), 2e-5)
    held = torch.cat(rows)
    assert bool((logits[:, held[is_hidden[held]]] == -1e30).all())


def test_fully_masked_query_gives_zero_and_minus_infinity():
    mask = torch.tensor([[True, False, True], [False, False, False]])
    queries, keys, values = random(0, 4, 2, 8), random(1, 2, 3, 8), random(2, 2, 3, 8)
    for form in (reference(masked_attention), flash_attention.masked):
        out, lse = form(queries, keys, values, SCALING, mask)
        assert not out[:, 1].any() and lse[:, 1].isneginf().all()
        assert out[:, 0].any() and lse[:, 0].isfinite().all()


@settings(max_examples=40)
@given(
    seeds,
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.integers(1, 2),
    group_lens,
    st.one_of(st.none(), st.integers(1, 5)),
)
def test_causal_forms_equal_the_reference(seed, sections, num_kv_heads, group_len, window):
    total = sum(sections)
    queries = random(seed, num_kv_heads * group_len, total, 8)
    keys, values = (
        random(seed + 1, num_kv_heads, total, 8),
        random(seed + 2, num_kv_heads, total, 8),
    )
    arguments = (queries, keys, values, SCALING, tuple(sections), window)
    expected = loop.causal(*arguments)
    for form in (causal_attention, reference(causal_attention)):
        agree(form(*arguments), expected, 2e-5)


@pytest.mark.parametrize("window", [None, 1, 63, 64, 65, 199, 200, 500])
def test_long_windows_in_chunks_equal_the_python_form(window):
    queries, keys, values = random(0, 4, 200, 8), random(1, 2, 200, 8), random(2, 2, 200, 8)
    arguments = (queries, keys, values, SCALING, (200,), window)
    agree(causal_attention(*arguments), reference(causal_attention)(*arguments), 2e-5)


@pytest.mark.parametrize(
    ("sections", "starts", "chunk", "expected"),
    [
        ((5,), (0,), 8, (5,)),
        ((8,), (0,), 8, (8,)),
        ((9,), (0,), 8, (8, 1)),
        ((6,), (5,), 4, (3, 3)),
        ((10, 3), (7, 7), 4, (1, 4, 4, 1, 1, 2)),
        ((3,), (4,), 1, (1, 1, 1)),
    ],
)
def test_chunk_sections_hand_values(sections, starts, chunk, expected):
    assert chunk_sections(sections, starts, chunk) == expected
    positions = [start + q for n, start in zip(sections, starts, strict=True) for q in range(n)]
    cuts = torch.tensor(expected).cumsum(0).tolist()
    for first, stop in zip([0, *cuts], cuts, strict=False):
        assert len({position // chunk for position in positions[first:stop]}) == 1


@settings(max_examples=40)
@given(seeds, st.integers(1, 4), st.integers(0, 12), st.integers(1, 14), group_lens)
def test_windowed_attention_equals_its_reference(seed, query_len, cached_len, window, group_len):
    queries = random(seed, 2 * group_len, query_len, 8)
    keys, values = random(seed + 1, 2, cached_len, 8), random(seed + 2, 2, cached_len, 8)
    positions = torch.arange(cached_len + query_len)
    arguments = (
        queries,
        positions[cached_len:] - window + 1,
        keys,
        values,
        positions[:cached_len],
        SCALING,
    )
    agree(windowed_attention(*arguments), loop.windowed(*arguments), 2e-5)


@settings(max_examples=30)
@given(seeds, st.integers(1, 40), st.data())
def test_merging_the_parts_equals_the_whole(seed, cached_len, data):
    cuts = data.draw(st.lists(st.integers(0, cached_len), max_size=3).map(sorted))
    queries, keys, values = (
        random(seed, 3, 4, 8),
        random(seed, cached_len, 8),
        random(1, cached_len, 8),
    )
    edges = [0, *cuts, cached_len]
    parts = [
        attention(queries, keys[a:b], values[a:b], SCALING)
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    outs, lses = zip(*parts, strict=True)
    agree(merge_attention(outs, lses), attention(queries, keys, values, SCALING), 2e-5)


def test_merge_of_empty_states_is_empty():
    out, lse = merge_attention([torch.zeros(2, 3)] * 2, [torch.full((2,), -torch.inf)] * 2)
    assert not out.any() and lse.isneginf().all()
