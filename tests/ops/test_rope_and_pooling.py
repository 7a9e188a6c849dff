"""Rotation and pooling against slow loops, and against transformers' own rotation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from larder.core import BadParameter
from larder.ops import frequencies, rerotate, rotate, running_max, running_mean


def rotated_by_hand(vector: list[float], position: int, theta: float) -> list[float]:
    half = len(vector) // 2
    turned = [0.0] * len(vector)
    for pair in range(half):
        angle = position * theta ** (-2 * pair / len(vector))
        x, y = vector[pair], vector[pair + half]
        turned[pair] = x * math.cos(angle) - y * math.sin(angle)
        turned[pair + half] = y * math.cos(angle) + x * math.sin(angle)
    return turned


def test_rotation_equals_its_reference() -> None:
    vectors = torch.randn(2, 5, 8)
    positions = torch.tensor([0, 3, 4, 90, 1000])
    turned = rotate(vectors, positions, frequencies(8, 10_000.0))
    for head in range(2):
        for row, position in enumerate(positions.tolist()):
            expected = rotated_by_hand(vectors[head, row].tolist(), position, 10_000.0)
            torch.testing.assert_close(turned[head, row], torch.tensor(expected), atol=1e-4, rtol=0)


def test_rotation_equals_the_model() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    keys, positions = torch.randn(3, 6, 16), torch.arange(4, 10)
    angles = positions[:, None] * frequencies(16, 10_000.0)
    angles = torch.cat([angles, angles], dim=-1)[None]
    expected, _ = apply_rotary_pos_emb(keys[None], keys[None], angles.cos(), angles.sin())
    torch.testing.assert_close(rotate(keys, positions, frequencies(16, 10_000.0)), expected[0])


def test_moved_key_equals_rotation_at_its_new_position() -> None:
    keys, radians = torch.randn(2, 7, 8), frequencies(8, 10_000.0)
    old, new = torch.randint(0, 500, (7,)), torch.randint(0, 500, (7,))
    moved = rerotate(rotate(keys, old, radians), old, new, radians)
    torch.testing.assert_close(moved, rotate(keys, new, radians), atol=1e-4, rtol=1e-4)


def test_dimensions_without_a_frequency_are_unchanged() -> None:
    vectors, positions = torch.randn(2, 5, 10), torch.tensor([0, 3, 4, 90, 1000])
    turned = rotate(vectors, positions, frequencies(6, 10_000.0))
    assert torch.equal(turned[..., :6], rotate(vectors[..., :6], positions, frequencies(6, 1e4)))
    assert torch.equal(turned[..., 6:], vectors[..., 6:])
    assert torch.equal(rotate(vectors, positions, torch.empty(0)), vectors)


def test_key_at_a_large_position_moves_accurately() -> None:
    """The difference of two angles that were each rounded is not the angle of the difference."""
    keys, radians = torch.randn(2, 9, 64), frequencies(64, 10_000.0)
    old, new = torch.arange(999_990, 999_999), torch.arange(9)
    moved = rerotate(rotate(keys, old, radians), old, new, radians)
    torch.testing.assert_close(moved, rotate(keys, new, radians), atol=1e-5, rtol=1e-5)


@given(st.lists(st.floats(-5, 5, width=32), max_size=20), st.sampled_from([1, 3, 5, 7]))
def test_pooling_equals_its_reference(values: list[float], width: int) -> None:
    scores, half = torch.tensor(values, dtype=torch.float32), width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    highest = torch.tensor([max(window) for window in windows], dtype=torch.float32)
    means = torch.tensor([sum(window) / width for window in windows], dtype=torch.float32)
    torch.testing.assert_close(running_max(scores, width), highest)
    torch.testing.assert_close(running_mean(scores, width), means, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pool", [running_max, running_mean])
def test_even_width_is_refused(pool: object) -> None:
    with pytest.raises(BadParameter, match="odd"):
        pool(torch.ones(4), 4)  # pyright: ignore
