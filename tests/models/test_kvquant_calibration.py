"""Calibration of `kvquant`: scales of channels, weights of numbers, and levels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from builders import a_layer
from larder.core import BadParameter
from larder.models import (
    GradedNumbers,
    KVQuantMeasurement,
    SampleText,
    graded_numbers,
    layer_levels,
    scaled_tables,
    weighted_levels,
    wrap_model,
)
from references import kvquant as reference
from tiny_models import tiny

IDS = tuple(range(3, 33))


def test_channel_ranges_exclude_one_percent_outliers() -> None:
    layer = a_layer(2, 2)
    keys = torch.randn(2, 400, layer.head_dim) * torch.linspace(0.1, 5, layer.head_dim) + 3
    tables = scaled_tables(layer, keys)
    scales = tables.forward[0].diagonal(dim1=1, dim2=2)
    for head in range(2):
        for channel in range(layer.head_dim):
            low, high = np.percentile(keys[head, :, channel].numpy(), [0.5, 99.5])
            assert float(tables.mean[0, head, channel]) == pytest.approx((high + low) / 2, abs=1e-4)
            assert float(1 / scales[head, channel]) == pytest.approx((high - low) / 2, rel=1e-3)
    assert torch.equal(tables.forward[1, 0], torch.eye(layer.head_dim))
    assert not tables.mean[1].any()


def test_levels_hand_values() -> None:
    numbers = np.array([-1.0, -0.8, 0.0, 0.2, 1.0])
    plain = weighted_levels(numbers, np.ones(5), 2)
    assert plain.tolist() == pytest.approx([-0.9, 0.4])
    weighed = weighted_levels(numbers, np.array([3.0, 1.0, 1.0, 1.0, 8.0]), 2)
    assert weighed.tolist() == pytest.approx([-3.8 / 4, 8.2 / 10])


def test_levels_equal_the_reference() -> None:
    source = np.random.default_rng(0)
    numbers, weights = source.normal(size=200).astype(np.float32), source.random(200)
    found = weighted_levels(numbers, weights.astype(np.float32), 4)
    expected = reference.levels(numbers.tolist(), weights.tolist(), 4, 50)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_layer_levels_follow_the_weights() -> None:
    layer = a_layer(1, 1)
    source = torch.Generator().manual_seed(0)
    numbers = [torch.randn(1, 300, layer.head_dim, generator=source) for _ in range(2)]
    tables, even = scaled_tables(layer, numbers[0]), torch.ones_like(numbers[0])
    upper = (numbers[0] > 0).float() + 1e-3
    alike = layer_levels(tables, GradedNumbers((*numbers,), (even, even)), 2)  # pyright: ignore
    above = layer_levels(tables, GradedNumbers((*numbers,), (upper, even)), 2)  # pyright: ignore
    assert alike.shape == (2, 4) and bool((alike.diff(dim=1) > 0).all())
    assert (above[0] > 0).sum() > (alike[0] > 0).sum() and torch.equal(above[1], alike[1])
    assert float(alike.abs().max()) <= 1


def test_sample_weights_are_reproducible_and_nonnegative() -> None:
    decoder = wrap_model(tiny("llama", layers=2))
    found = graded_numbers(decoder, IDS, 2, 0)
    again = graded_numbers(decoder, IDS, 2, 0)
    assert sorted(found) == [layer.index for layer in decoder.spec.managed]
    for layer in decoder.spec.managed:
        own = found[layer.index]
        shape = (layer.kv_heads, len(IDS) - 2, layer.head_dim)
        for side in (0, 1):
            assert own.numbers[side].shape == own.weights[side].shape == shape
            assert torch.equal(own.weights[side], again[layer.index].weights[side])
            assert bool((own.weights[side] >= 0).all()) and bool(own.weights[side].any())
    joined = GradedNumbers.concat([found[0], again[0]])
    assert joined.numbers[0].shape[1] == 2 * (len(IDS) - 2)


def test_measurement_has_levels_of_all_widths() -> None:
    decoder = wrap_model(tiny("llama", layers=2))
    sample = SampleText(lambda text: [ord(letter) % 30 + 3 for letter in text])
    part = KVQuantMeasurement(tokens=48, piece=24)
    tables = part.measure_tables(decoder, sample)
    for layer in decoder.spec.managed:
        for bits in (2, 3, 4):
            levels = tables[f"{layer.index}.levels{bits}"]
            assert levels.shape == (2, 1 << bits) and bool((levels.diff(dim=1) >= 0).all())
    assert len(part.summary(tables)) == 2 and min(part.summary(tables)) > 0
    with pytest.raises(BadParameter, match="sinks < piece"):
        KVQuantMeasurement(tokens=4, piece=8)
