"""Costs of noise in keys and values: gradients by finite differences, and weights by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from larder.cache import TransformTables
from larder.models import ShiftedAttention, cost_weights, noise_costs
from larder.training import differentiable_states
from larder_bench.random_models import open_model

IDS = tuple(range(20, 32))
PLACE = 1, 5, 3  # kv head, token, channel


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    return open_model("random:qwen3-tiny").decoder


def plain_tables(decoder) -> dict[int, TransformTables]:
    """Components are the numbers of keys before rotation, and of values."""
    found = {}
    for layer in decoder.spec.managed:
        same = torch.eye(layer.head_dim).expand(2, layer.kv_heads, -1, -1)
        none = torch.zeros(2, layer.kv_heads, layer.head_dim)
        found[layer.index] = TransformTables(same, none, none + 1, layer.radians)
    return found


def test_shifts_equal_finite_differences(decoder) -> None:
    attention = ShiftedAttention([1])
    states = differentiable_states(decoder, IDS, attention)
    assert list(attention.shifts) == [1]
    direction = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((states * direction).sum(), attention.shifts[1])
    for side in range(2):

        class Moved(ShiftedAttention):
            def __init__(self, size: float, side: int = side) -> None:
                super().__init__([])
                self.size, self.side = size, side

            def attend(self, inputs):
                if inputs.layer != 1:
                    return super().attend(inputs)
                sides = [inputs.keys.detach().clone(), inputs.values.detach().clone()]
                sides[self.side][PLACE] += self.size
                return super().attend(replace(inputs, keys=sides[0], values=sides[1]))

        sums = []
        for size in (1e-2, -1e-2):
            moved = differentiable_states(decoder, IDS, Moved(size)).detach()
            sums.append(float((moved * direction).sum()))
        wanted = (sums[0] - sums[1]) / 2e-2
        assert float(gradients[side][PLACE]) == pytest.approx(wanted, rel=0.05, abs=2e-3)


def test_costs_scale_with_the_inverse_square_of_component_factors(decoder) -> None:
    tables = plain_tables(decoder)
    costs = noise_costs(decoder, [IDS, IDS[::-1]], tables, 2)
    assert all(bool((own > 0).all()) and own.shape == (2, 2) for own in costs.values())
    factors = torch.tensor([[2.0, 1.0], [1.0, 4.0]])
    scaled = {index: own.scaled(factors) for index, own in tables.items()}
    for index, own in noise_costs(decoder, [IDS, IDS[::-1]], scaled, 2).items():
        torch.testing.assert_close(own, costs[index] / factors**2)


def test_weights_equalize_costs_and_keep_their_mean() -> None:
    costs = {0: torch.tensor([[4.0], [16.0]]), 3: torch.tensor([[1.0], [0.25]])}
    weights = cost_weights(costs)
    assert weights[0].flatten().tolist() == pytest.approx([2 / 2**0.5, 4 / 2**0.5])
    assert weights[3].flatten().tolist() == pytest.approx([1 / 2**0.5, 0.5 / 2**0.5])
    silent = cost_weights({0: torch.tensor([[1.0], [0.0]])})
    assert silent[0].flatten().tolist() == [64.0, 1 / 64]
