"""The divergence equals a slow loop over probabilities, for any chunks."""

from __future__ import annotations

import math

import pytest
import torch

from larder_bench.scoring.kl_divergence import kl_divergence


def slow(true: list[float], believed: list[float]) -> float:
    p, q = ([math.exp(x) for x in row] for row in (true, believed))
    p, q = ([x / sum(row) for x in row] for row in (p, q))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
def test_kl_equals_its_reference(chunk: int) -> None:
    true, believed = 3 * torch.randn(5, 13), 3 * torch.randn(5, 13)
    rows = zip(true.tolist(), believed.tolist(), strict=True)
    wanted = [slow(one, other) for one, other in rows]
    assert kl_divergence(true, believed, chunk).tolist() == pytest.approx(wanted, rel=1e-4)


def test_kl_direction_hand_values() -> None:
    true, believed = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    wanted = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert float(kl_divergence(true, believed)) == pytest.approx(wanted)
    assert float(kl_divergence(believed, true)) == pytest.approx(
        0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    )


def test_kl_of_equal_or_shifted_logits_is_zero() -> None:
    logits = torch.randn(4, 50)
    assert kl_divergence(logits, logits + 7).tolist() == pytest.approx([0.0] * 4, abs=1e-5)
    assert bool((kl_divergence(logits, logits + 1e-4 * torch.randn(4, 50)) >= 0).all())
