"""Attention over codes: both forms equal the loop over the numbers that the codes stand for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from larder.core import Codec, ScaleGranularity
from larder.ops import QuantizedKV, quantize_rows
from larder.ops import quantized_attention as ops
from larder.ops.cpu import quantized_attention as cpu_quantized_attention
from larder.ops.quantized_attention import quantized_attention
from references.ops.coded_attention import attended
from without_kernels import reference

SCALING = 0.3
NONE = torch.empty(0, 0)
CODECS = {
    "four": Codec(4, 4, 8),
    "two_far": Codec(2, 2, 8, outliers=0.05),
    "mixed_far": Codec(8, 4, 5, outliers=0.1),
    "long_groups": Codec(8, 8, 40, outliers=0.02, channels=0.6),
    "thin": Codec(2, 8, 7, outliers=0.2, channels=0.3),
    "odd": Codec(7, 3, 8),
    "odd_by_entry": Codec(5, 6, 8, outliers=0.05, key_scales=ScaleGranularity.ENTRY),
    "one": Codec(1, 1, 8),
    "leveled": Codec(4, 2, 6, balance=0.5),
    "leveled_far": Codec(2, 4, 9, outliers=0.1, balance=1.0),
    "unrounded": Codec(0, 4, 8, channels=0.5),
}


def some_rows(
    codec: Codec, owners: list[int], counts: list[int], head_dim: int = 12
) -> QuantizedKV:
    source = torch.Generator().manual_seed(len(counts))
    keys, values = torch.randn(2, sum(counts), head_dim, generator=source)
    sizes = torch.tensor(counts)
    return QuantizedKV(
        quantize_rows(keys, sizes, codec.keys(head_dim), NONE, torch.float32),
        quantize_rows(values, sizes, codec.values(head_dim), NONE, torch.float32),
        torch.stack([torch.tensor(owners), sizes], dim=1).int(),
    )


def check(rows: QuantizedKV, queries: Tensor, bias: Tensor | None, heads: int) -> None:
    keys, values = rows.decoded(torch.arange(len(rows)))
    added = torch.zeros(len(rows)) if bias is None else bias
    expected = attended(queries, keys, values, rows.heads().tolist(), SCALING, added)
    for form in (quantized_attention, reference(quantized_attention)):
        got = form(queries, rows, heads, SCALING, bias)
        for part, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(part.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.fixture(params=["C", pytest.param("numba", marks=pytest.mark.slow)])
def compiled(request, monkeypatch) -> None:
    """The kernel in C, and that of numba, which is used where no C compiler was found."""
    if request.param == "numba":
        monkeypatch.setattr(cpu_quantized_attention, "c_library", lambda: None)


# Groups of a head in any places, the last of three heads uneven.
OWNERS, COUNTS = [1, 0, 2, 0, 1, 2, 2], [5, 3, 1, 4, 2, 5, 5]


@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("name", CODECS)
def test_both_forms_equal_the_reference(name, queries, monkeypatch, compiled) -> None:
    monkeypatch.setattr(ops, "DECODE_CHUNK", 4)
    rows = some_rows(CODECS[name], OWNERS, COUNTS)
    source = torch.Generator().manual_seed(queries)
    asked = torch.randn(6, queries, 12, generator=source)
    check(rows, asked, None, 3)
    check(rows, asked, torch.randn(len(rows), generator=source), 3)


def test_non_contiguous_views_are_supported(compiled) -> None:
    rows = some_rows(CODECS["four"], OWNERS, COUNTS)
    wide = torch.cat([rows.keys.stored, rows.keys.stored], 1)
    gapped = replace(rows.keys, stored=wide[:, : rows.keys.stored.shape[1]])
    assert not gapped.stored.is_contiguous()
    check(replace(rows, keys=gapped), torch.randn(6, 1, 12), None, 3)


def test_groups_longer_than_a_block_are_supported(compiled) -> None:
    rows = some_rows(CODECS["long_groups"], [0, 1, 0], [40, 33, 7], 16)
    check(rows, torch.randn(4, 1, 16), torch.randn(80), 2)


def test_head_without_entries_has_zero_output(compiled) -> None:
    rows = some_rows(CODECS["four"], [1, 1], [3, 2])
    for form in (quantized_attention, reference(quantized_attention)):
        out, lse = form(torch.randn(6, 1, 12), rows, 3, SCALING)
        assert not out[:2].any() and not out[4:].any() and out[2:4].all()
        assert lse[[0, 1, 4, 5]].isneginf().all() and lse[2:4].isfinite().all()


@pytest.mark.slow
def test_results_over_many_groups_do_not_depend_on_threads(monkeypatch, compiled) -> None:
    rows = some_rows(CODECS["two_far"], [0, 1, 1, 0, 1] * 12, [8, 7, 4, 8, 5] * 12)
    queries, bias = torch.randn(4, 2, 12), torch.randn(len(rows))
    expected = quantized_attention(queries, rows, 2, SCALING, bias)
    monkeypatch.setattr(cpu_quantized_attention, "num_threads_for", lambda floats: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(cpu_quantized_attention, "SPAN_FLOATS", 1)
    for _ in range(2):
        shared = quantized_attention(queries, rows, 2, SCALING, bias)
        for part, wanted in zip(shared, expected, strict=True):
            torch.testing.assert_close(part, wanted, atol=2e-6, rtol=2e-6)
    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(quantized_attention, queries, rows, 2, SCALING, bias) for _ in range(12)
        ]
    for call in calls:
        torch.testing.assert_close(call.result()[0], expected[0], atol=2e-6, rtol=2e-6)
