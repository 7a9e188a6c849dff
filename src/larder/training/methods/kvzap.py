"""KVzap: regression of the logarithm of KVzip+'s score on hidden states, linear or a perceptron.

Jegou and Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning" (2026), arXiv:2601.07891.
The inner size of the perceptron (`kvzap_mlp`) is an eighth of the hidden state's, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.spec import LayerSpec
from larder.policy.providers._layer_gates import perceptron_gate
from larder.training.base import LayerData, Method, fit_by_gradient
from larder.training.labels import PLUS, log_labels
from larder.training.methods._perceptron import (
    Standardization,
    first_tensors,
    shuffled_batches,
    unscaled,
)


@dataclass(frozen=True)
class KVzapRidge(Method):
    """Closed form.

    Args:
        alpha: weight of the squared coefficients; the constant is free. The paper takes 1, with
            1.2 million tokens.
    """

    alpha: float = 10.0
    label = PLUS

    def __post_init__(self) -> None:
        require(self.alpha > 0, "kvzap.alpha", "above 0", self.alpha)

    def target(self, labels: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
        return log_labels(labels)

    def fit(self, data: LayerData, layer: LayerSpec, seed: int) -> dict[str, Tensor]:
        weight, bias = ridge(data.states, data.targets, self.alpha)
        return {"weight": weight, "bias": bias}


@dataclass(frozen=True)
class KVzapPerceptron(Method):
    """Perceptron with GELU, by AdamW on squared errors.

    Args:
        share: inner size over that of the hidden state.
        rate: highest learning rate.
        batch: tokens of a step.
    """

    share: float = 1 / 8
    epochs: int = 15
    rate: float = 5e-3
    batch: int = 512
    label = PLUS

    def __post_init__(self) -> None:
        if not self.share > 0 or self.epochs < 1 or self.batch < 1 or not self.rate > 0:
            raise BadParameter(f"kvzap_mlp needs numbers above 0, got {self}.")

    def target(self, labels: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
        return log_labels(labels)

    def fit(self, data: LayerData, layer: LayerSpec, seed: int) -> dict[str, Tensor]:
        inputs, outputs = Standardization.of(data.states), Standardization.of(data.targets)
        states, targets = inputs.apply(data.states), outputs.apply(data.targets)
        width = states.shape[1]
        inner = max(round(self.share * width), 1)
        fitted = fit_by_gradient(
            first_tensors(width, inner, layer.kv_heads, seed),
            lambda own, rows: F.mse_loss(perceptron_gate(states[rows], own, F.gelu), targets[rows]),
            partial(shuffled_batches, len(states), self.batch),
            epochs=self.epochs,
            rate=self.rate,
            seed=seed,
        )
        return unscaled(fitted, inputs, outputs)


def ridge(
    inputs: Float[Tensor, "N hidden"], targets: Float[Tensor, "N K"], alpha: float
) -> tuple[Float[Tensor, "K hidden"], Float[Tensor, " K"]]:
    """Coefficients and constants of ridge regression, solved in float64."""
    mean, center = inputs.double().mean(0), targets.double().mean(0)
    rows = inputs.double() - mean
    squares = rows.T @ rows + alpha * torch.eye(rows.shape[1], dtype=torch.float64)
    solution = torch.linalg.solve(squares, rows.T @ (targets.double() - center))
    return solution.T.float(), (center - mean @ solution).float()


Part = KVzapRidge
