"""Lines of attention are those of the loop, and products along them those of a mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from larder.ops import SAMPLED_QUERIES, AttentionLines, choose_lines, head_lines, line_attention
from larder.ops.attention import attention
from references import line_attention as loop

SCALING = 0.5


def head(seed: int, queries: int, keys: int, heads: int = 2) -> tuple[torch.Tensor, ...]:
    """Queries behind keys at positions with gaps, as after an eviction; queries are the last."""
    source = torch.Generator().manual_seed(seed)
    indices = torch.randperm(2 * keys, generator=source)[:keys].sort().values
    numbers = torch.randn(heads + 2, keys, 8, generator=source) * 2
    return numbers[:heads, keys - queries :], numbers[-2], numbers[-1], indices


@given(st.integers(0, 99), st.integers(1, 6), st.integers(0, 8), st.floats(0.1, 0.999))
@settings(max_examples=40, deadline=None)
def test_lines_equal_the_reference(seed: int, queries: int, cached: int, coverage: float) -> None:
    rows, keys, _, indices = head(seed, queries, queries + cached)
    positions = indices[cached:]
    found = head_lines(rows, keys, positions, indices, SCALING, coverage)
    hidden = positions[:, None] < indices
    for own, lines in zip(rows, found, strict=True):
        weights = (own @ keys.T * SCALING).masked_fill(hidden, -torch.inf).softmax(-1)
        numbers = weights.tolist(), positions.tolist(), indices.tolist()
        chosen = {(0, n) for n in lines.verticals.tolist()} | {
            (1, n) for n in lines.slashes.tolist()
        }
        assert loop.is_chosen(chosen, *numbers, coverage)
        covered = weights[lines.mask(positions, indices)].sum()
        assert covered >= coverage * weights.sum() * (1 - 1e-5)


@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_outputs_equal_masked_attention(coverage: float) -> None:
    rows, keys, values, indices = head(3, 70, 90)
    positions = indices[20:]
    out, lse = line_attention(rows, [(keys, values, indices)], positions, SCALING, coverage)
    found = head_lines(rows, keys, positions, indices, SCALING, coverage)
    for own, lines, one, total in zip(rows, found, out, lse, strict=True):
        mask = lines.mask(positions, indices)
        assert 0 < mask.float().mean() < 0.7
        expected, sums = attention(own[None], keys, values, SCALING, mask)
        torch.testing.assert_close(one, expected[0])
        torch.testing.assert_close(total, sums[0])


def test_full_coverage_is_exact() -> None:
    rows, keys, values, indices = head(4, SAMPLED_QUERIES, 50)
    positions = indices[-SAMPLED_QUERIES:]
    out, lse = line_attention(rows, [(keys, values, indices)], positions, SCALING, 1.0)
    expected, sums = attention(rows, keys, values, SCALING, positions[:, None] >= indices)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse, sums, atol=1e-4, rtol=1e-4)


def test_chosen_lines_hand_values() -> None:
    weights = torch.tensor([[[1.0, 0.0, 0.0], [0.875, 0.125, 0.0], [0.5, 0.25, 0.25]]])
    distances = torch.tensor([[0, -1, -2], [1, 0, -1], [2, 1, 0]])
    # Distance 0: 1 + .125 + .25 of 3, .458. Key 0 brings .875 + .5, distance 1 .875 + .25: the key
    # makes .917.
    (half,) = choose_lines(weights, distances, 0.4)
    assert (half.verticals.tolist(), half.slashes.tolist()) == ([], [0])
    (most,) = choose_lines(weights, distances, 0.9)
    assert (most.verticals.tolist(), most.slashes.tolist()) == ([0], [0])
    (all_of_it,) = choose_lines(weights, distances, 1.0)  # key 1 before distance 1
    assert (all_of_it.verticals.tolist(), all_of_it.slashes.tolist()) == ([0, 1], [0])
    mask = AttentionLines(torch.tensor([0]), torch.tensor([1])).mask(
        torch.tensor([4, 5]), torch.tensor([2, 4, 5])
    )
    assert mask.tolist() == [[True, False, False], [True, True, False]]
