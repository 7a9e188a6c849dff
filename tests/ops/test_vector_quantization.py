"""Vector quantization: known grids, Hadamard matrices by hand, and codes by a loop."""

from __future__ import annotations

import math

import pytest
import torch

from larder.core import hadamard_order
from larder.ops import VectorQuantizer, gaussian_grid, hadamard
from references import aqua as reference


def half(number: float) -> float:
    return float(torch.tensor(number).half())


def mean_error(bits: int) -> float:
    numbers = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    quantizer = VectorQuantizer(16, bits)
    return float((quantizer.decode(quantizer.encode(numbers)) - numbers).square().mean())


def test_four_points_equal_two_levels_per_dimension() -> None:
    # Two levels of a normal number are +-sqrt(2 / pi), with an error of 1 - 2 / pi.
    points = gaussian_grid(4)
    lengths = points.norm(dim=1)
    assert lengths.tolist() == pytest.approx([math.sqrt(4 / math.pi)] * 4, abs=0.03)
    assert float((points @ points.T).min()) == pytest.approx(-4 / math.pi, abs=0.06)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("bits", "levels"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)], ids=["2", "3", "4"]
)
def test_pair_grid_has_less_error_than_scalar_levels(bits, levels) -> None:
    # Max, "Quantizing for minimum distortion" (1960): errors of 4, 8 and 16 levels.
    points = gaussian_grid(1 << (2 * bits))
    assert points.unique(dim=0).shape == (1 << (2 * bits), 2)
    samples = torch.randn(20000, 2, generator=torch.Generator().manual_seed(1))
    nearest = torch.cdist(samples, points).min(1).values
    assert 0.8 * levels < float(nearest.square().mean() / 2) < 0.96 * levels


@pytest.mark.parametrize(
    ("width", "order"),
    [(16, 16), (192, 192), (640, 640), (12, 12), (20, 20), (10, 2), (72, 24), (56, 8)],
)
def test_hadamard_order_is_the_largest_that_divides_the_width(width, order) -> None:
    assert hadamard_order(width) == order


def test_hadamard_order_four_hand_values() -> None:
    signs = [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    assert (2 * hadamard(4)).tolist() == signs


@pytest.mark.parametrize("order", [2, 12, 20, 24, 192, 320])
def test_hadamard_rows_are_orthonormal_with_equal_magnitudes(order) -> None:
    matrix = hadamard(order)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(order), atol=1e-5, rtol=0)
    torch.testing.assert_close(matrix.abs(), torch.full((order, order), order**-0.5))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_codes_equal_the_reference(bits) -> None:
    numbers = 3 * torch.randn(5, 16, generator=torch.Generator().manual_seed(bits)) + 1
    quantizer, grid = VectorQuantizer(16, bits), gaussian_grid(1 << (2 * bits)).tolist()
    codes = quantizer.encode(numbers)
    assert codes.packed.shape == (5, 2 * bits)
    expected = [reference.held(row, grid, half) for row in numbers.tolist()]
    torch.testing.assert_close(quantizer.decode(codes), torch.tensor(expected), atol=1e-4, rtol=0)


def test_error_decreases_with_bits() -> None:
    errors = [mean_error(bits) for bits in (1, 2, 3, 4)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.012


def test_zeros_and_large_values_round_trip() -> None:
    quantizer = VectorQuantizer(16, 4)
    numbers = torch.zeros(2, 16)
    numbers[1, 3] = 1e4
    back = quantizer.decode(quantizer.encode(numbers))
    assert not back[0].any()
    assert float(back[1, 3]) == pytest.approx(1e4, rel=0.05)
