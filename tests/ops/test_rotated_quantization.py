"""Levels of a random direction, and vectors turned back from their codes."""

from __future__ import annotations

import math

import pytest
import torch

from larder.core import Codec, Grid
from larder.ops import quantize_rows
from larder.ops import rotated_quantization as rotated
from references.turboquant import levels as slow_levels


def some_vectors(count: int = 4000, size: int = 64) -> torch.Tensor:
    source = torch.Generator().manual_seed(5)
    return torch.randn(count, size, generator=source) * 3


def test_levels_equal_the_reference() -> None:
    found = rotated.levels(2, 16)
    assert found.tolist() == pytest.approx(slow_levels(2, 16, points=4000, rounds=40), abs=1e-3)


def test_one_bit_levels_are_half_normal_means() -> None:
    own = math.sqrt(2 / math.pi / 1000)
    assert rotated.levels(1, 1000).tolist() == pytest.approx([-own, own], rel=2e-3)
    assert rotated.levels(0, 64).tolist() == pytest.approx([0.0], abs=1e-6)


@pytest.mark.parametrize(("bits", "error"), [(1, 0.36), (2, 0.117), (3, 0.03), (4, 0.009)])
def test_errors_match_the_paper(bits: int, error: float) -> None:
    # Distortion of a unit vector, theorem 1 of arXiv:2504.19874.
    vectors = some_vectors()
    near = rotated.decode(*rotated.encode(vectors, bits), bits)
    found = ((vectors - near).square().sum(1) / vectors.square().sum(1)).mean()
    assert float(found) == pytest.approx(error, rel=0.16)


def test_rotation_keeps_lengths() -> None:
    own = rotated.rotation(24)
    assert torch.allclose(own @ own.T, torch.eye(24), atol=1e-5)


@pytest.mark.parametrize("bits", [1, 3])
def test_inner_products_of_sketched_codes_are_unbiased(bits: int) -> None:
    vectors = some_vectors()
    codes, norms, rests = rotated.encode_sketched(vectors, bits)
    near = rotated.decode_sketched(codes, norms, rests, bits)
    own, theirs = vectors.square().sum(1), (vectors * near).sum(1)
    assert float(theirs.sum() / own.sum()) == pytest.approx(1, abs=0.02)
    plain = rotated.decode(*rotated.encode(vectors, max(bits, 1)), max(bits, 1))
    assert float((vectors * plain).sum() / own.sum()) < 0.98  # levels alone shrink vectors


def test_zero_vector_round_trips() -> None:
    nothing = torch.zeros(2, 8)
    assert torch.equal(rotated.decode(*rotated.encode(nothing, 2), 2), nothing)
    assert torch.equal(rotated.decode_sketched(*rotated.encode_sketched(nothing, 2), 2), nothing)


@pytest.mark.parametrize("grid", [Grid.NORMAL, Grid.SKETCHED])
def test_rows_are_rotated_back_and_take_the_declared_bytes(grid: Grid) -> None:
    codec = Codec(3, 3, 4, key_grid=grid)
    scheme, vectors = codec.keys(64), some_vectors(10)
    counts = torch.tensor([4, 6])
    rows = quantize_rows(vectors, counts, scheme, vectors.new_empty(0, 0), torch.float32)
    some, groups = torch.tensor([1, 5, 9]), torch.tensor([0, 1, 1])
    if grid is Grid.NORMAL:
        wanted = rotated.decode(*rotated.encode(vectors, 3), 3)
    else:
        wanted = rotated.decode_sketched(*rotated.encode_sketched(vectors, 3), 3)
    assert torch.allclose(rows.decoded(some, groups), wanted[some], atol=1e-6)
    kept = rows.select(some, torch.tensor([0, 1]))
    assert torch.allclose(kept.decoded(torch.arange(3), groups), wanted[some], atol=1e-6)
    assert sum(part.nbytes for part in rows.tensors().values()) == 10 * scheme.entry_bytes(4)
