"""Products over few channels and over codes: both forms equal the sum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from larder.ops import channel_products, pq_products
from larder.ops.cpu import approximate_products
from without_kernels import reference


@settings(max_examples=20)
@given(
    shape=st.tuples(*[st.integers(1, 4)] * 4),
    length=st.sampled_from([0, 1, 7, 2049]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_channel_products_equal_their_reference(shape, length, dtype, seed) -> None:
    heads, group, count, width = shape
    source = torch.Generator().manual_seed(seed)
    tables = torch.randn(heads, width, length + 3, generator=source).to(dtype)
    tables[:, :, length:] = torch.nan
    picks = torch.randint(width, (heads, group, count), generator=source)
    weights = torch.randn(heads, group, count, generator=source)
    wanted = torch.zeros(heads, group, length, dtype=torch.float64)
    for k in range(heads):
        for g in range(group):
            for n in range(count):
                row = tables[k, int(picks[k, g, n]), :length].double()
                wanted[k, g] += float(weights[k, g, n]) * row
    for form in (
        channel_products,
        reference(channel_products),
        approximate_products.channel_products,
    ):
        assert torch.allclose(form(tables, picks, weights, length).double(), wanted, atol=1e-5)


@settings(max_examples=20)
@given(
    shape=st.tuples(*[st.integers(1, 4)] * 4),
    length=st.sampled_from([0, 1, 7, 100]),
    seed=st.integers(0, 2**31),
)
def test_code_products_equal_their_reference(shape, length, seed) -> None:
    heads, group, parts, width = shape
    source = torch.Generator().manual_seed(seed)
    tables = torch.randn(heads, group, parts, width, generator=source)
    numbers = torch.randint(width, (heads, parts, length), generator=source)
    held = torch.nn.functional.pad(numbers, (0, 3), value=255).to(torch.uint8)
    for form in (pq_products, reference(pq_products), approximate_products.pq_products):
        sums = form(tables, held, length)
        for k in range(heads):
            for g in range(group):
                for s in range(length):
                    each = (float(tables[k, g, p, numbers[k, p, s]]) for p in range(parts))
                    assert float(sums[k, g, s]) == pytest.approx(sum(each), abs=1e-5)


def test_half_precision_and_transposed_tables_are_unsupported() -> None:
    assert approximate_products.supports_channel_tables(torch.zeros(1, 2, 3))
    assert not approximate_products.supports_channel_tables(torch.zeros(1, 2, 3).half())
    assert not approximate_products.supports_channel_tables(torch.zeros(1, 2, 3).transpose(1, 2))
    assert not approximate_products.supports_codes(
        torch.zeros(1, 2, 3, dtype=torch.uint8).transpose(1, 2)
    )


def test_products_over_long_tables_equal_the_python_form() -> None:
    source = torch.Generator().manual_seed(0)
    tables = torch.randn(2, 16, 5000, generator=source)
    picks = torch.randint(16, (2, 2, 8), generator=source)
    weights = torch.randn(2, 2, 8, generator=source)
    sums = reference(channel_products)(tables, picks, weights, 5000)
    assert torch.allclose(channel_products(tables, picks, weights, 5000), sums, atol=1e-4)
