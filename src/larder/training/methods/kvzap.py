"""KVzap, linear: ridge regression of the logarithm of KVzip+'s score on hidden states.

Jegou and Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning" (2026), arXiv:2601.07891.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.spec import LayerSpec
from larder.training.base import LayerData, Method
from larder.training.labels import PLUS, log_labels


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
