"""Products of a few rows in C: their numbers, and rows that do not depend on others."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from larder.ops import MAX_ROWS, c_library, few_rows_linear, is_supported, max_rows
from larder.ops.cpu import decoder_layer

needs_library = pytest.mark.skipif(c_library() is None, reason="no C compiler at installation")
MOST_ROWS = 140  # of the tests: several tiles of 16 and panels of 64, and parts of one
ROUNDING = {torch.bfloat16: 2**-7, torch.float32: 1e-5}  # of a number, relative
by_dtype = pytest.mark.parametrize("dtype", list(ROUNDING))


def random_rows(count: int, size: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_library
@given(
    rows=st.integers(1, MOST_ROWS),
    inputs=st.integers(1, 5),
    outputs=st.integers(1, 6),
    seed=st.integers(0, 9),
)
@by_dtype
def test_product_equals_the_rounded_float32_product(dtype, rows, inputs, outputs, seed):
    given = random_rows(rows, 32 * inputs, seed, dtype)
    weight = random_rows(16 * outputs, 32 * inputs, 99, dtype)
    expected = given.float() @ weight.float().T
    torch.testing.assert_close(
        few_rows_linear(given, weight).float(), expected, rtol=ROUNDING[dtype], atol=1e-4
    )


@needs_library
@given(rows=st.integers(1, MOST_ROWS), threads=st.integers(1, 3), seed=st.integers(0, 9))
@by_dtype
def test_row_is_bitwise_independent_of_batch_and_threads(dtype, rows, threads, seed):
    given, weight = random_rows(rows, 160, seed, dtype), random_rows(112, 160, 99, dtype)
    before = torch.get_num_threads()
    alone = torch.cat([few_rows_linear(row, weight) for row in given.split(1)])
    torch.set_num_threads(threads)
    try:
        assert torch.equal(few_rows_linear(given, weight), alone)
    finally:
        torch.set_num_threads(before)


@needs_library
@pytest.mark.parametrize("rows", range(1, 41))
@by_dtype
def test_every_row_of_a_tile_equals_the_row_alone(dtype, rows):
    given, weight = random_rows(rows, 96, rows, dtype), random_rows(48, 96, 99, dtype)
    alone = torch.cat([few_rows_linear(row, weight) for row in given.split(1)])
    assert torch.equal(few_rows_linear(given, weight), alone)


@needs_library
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
@by_dtype
def test_non_finite_values_propagate(special, dtype):
    rows, weight = torch.ones(2, 32, dtype=dtype), torch.ones(16, 32, dtype=dtype)
    rows[1, 5] = special
    out = few_rows_linear(rows, weight)
    assert out[0].tolist() == [32] * 16
    assert torch.equal(out[1].isnan(), torch.full((16,), special != special))
    assert special != special or out[1].tolist() == [special] * 16


@pytest.mark.parametrize(
    ("outputs", "inputs", "expected"),
    [(16, 32, True), (48, 96, True), (8, 32, False), (16, 48, False)],
)
def test_supported_sizes_are_multiples_of_16_outputs_and_32_inputs(outputs, inputs, expected):
    assert is_supported(outputs, inputs) is expected


def test_missing_kernel_takes_no_rows(monkeypatch):
    monkeypatch.setattr(decoder_layer, "c_library", lambda: None)
    assert decoder_layer._saved_rows.__wrapped__(torch.bfloat16) == 0


@needs_library
@pytest.mark.parametrize(
    ("slow_rows", "expected"),
    [
        ((), MAX_ROWS),
        ((MAX_ROWS,), 256),
        ((MAX_ROWS, 256, 128, 64), 32),
        ((MAX_ROWS, 256, 128, 64, 32), 16),
        ((MAX_ROWS, 256, 128, 64, 32, 16, 8), 1),
        (decoder_layer.ROW_COUNTS, 0),
    ],
)
def test_max_rows_is_the_measured_crossover(monkeypatch, slow_rows, expected):
    def seconds(product, rows, weights) -> float:
        return 2 if product is few_rows_linear and len(rows) in slow_rows else 1

    monkeypatch.setattr(decoder_layer, "_seconds_of_pass", seconds)
    monkeypatch.setattr(decoder_layer, "_most_rows", lambda dtype: MAX_ROWS)
    assert decoder_layer._measured_rows(torch.bfloat16) == expected


@needs_library
@pytest.mark.parametrize(("slowdown", "expected"), [(1.04, 512), (1.06, 64), (1.1, 32), (1.2, 16)])
def test_many_rows_must_be_nearly_as_fast_as_torch(monkeypatch, slowdown, expected):
    def seconds(product, rows, weights) -> float:
        return slowdown if product is few_rows_linear else 1

    monkeypatch.setattr(decoder_layer, "_seconds_of_pass", seconds)
    monkeypatch.setattr(decoder_layer, "_most_rows", lambda dtype: MAX_ROWS)
    assert decoder_layer._measured_rows(torch.bfloat16) == expected


@needs_library
def test_products_of_many_rows_are_timed_with_fewer_weights(monkeypatch):
    timed = dict[int, int]()

    def seconds(product, rows, weights) -> float:
        timed[len(rows)] = len(weights)
        return 2 if product is few_rows_linear else 1

    monkeypatch.setattr(decoder_layer, "_seconds_of_pass", seconds)
    monkeypatch.setattr(decoder_layer, "_most_rows", lambda dtype: MAX_ROWS)
    decoder_layer._measured_rows(torch.float32)
    most = max(timed.values())
    assert timed == {count: most * 128 // max(count, 128) for count in decoder_layer.ROW_COUNTS}


@needs_library
def test_measurement_stops_at_the_fast_row_count(monkeypatch):
    measured = list[int]()

    def seconds(product, rows, weights) -> float:
        measured.append(len(rows))
        return 1

    monkeypatch.setattr(decoder_layer, "_seconds_of_pass", seconds)
    monkeypatch.setattr(decoder_layer, "_most_rows", lambda dtype: 16)
    assert decoder_layer._measured_rows(torch.bfloat16) == max(measured) == 16


@needs_library
def test_threads_that_measure_at_once_get_one_number(monkeypatch):
    started, measuring = threading.Barrier(2), list[int]()

    def seconds(product, rows, weights) -> float:
        """Seconds in which the kernel is fast in the thread that came first."""
        measuring.append(threading.get_ident())
        time.sleep(0.01)  # the other one comes meanwhile
        is_slow = product is few_rows_linear and measuring[-1] != measuring[0]
        return 2 if is_slow else 1

    def measure() -> int:
        started.wait(30)
        return max_rows(torch.float32)

    monkeypatch.setattr(decoder_layer, "_seconds_of_pass", seconds)
    monkeypatch.setattr(decoder_layer, "_most_rows", lambda dtype: 16)
    decoder_layer._saved_rows.cache_clear()
    with ThreadPoolExecutor(2) as threads:
        found = [each.result() for each in [threads.submit(measure) for _ in range(2)]]
    decoder_layer._saved_rows.cache_clear()
    assert found == [16, 16]
    assert len(set(measuring)) == 1


@needs_library
def test_rows_are_measured_once_per_machine(monkeypatch):
    measured = list[torch.dtype]()

    def measure(dtype) -> int:
        measured.append(dtype)
        return 16

    monkeypatch.setattr(decoder_layer, "_measured_rows", measure)
    starts = decoder_layer._saved_rows.__wrapped__
    rows = [starts(dtype) for _ in range(2) for dtype in (torch.bfloat16, torch.float32)]
    assert rows == [16] * 4
    assert measured == [torch.bfloat16, torch.float32]
