"""Locret: retaining heads that predict the highest logit a later token gives an entry.

Huang et al., "Locret: Enhancing Eviction in Long-Context LLM Inference with Trained Retaining Heads
on Consumer-Grade Devices" (2024), arXiv:2410.01805: smooth L1 loss, and 0.0025 times the mean
squared difference of neighboring scores. Labels there are of the answer to a question; here of a
copy of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.spec import LayerSpec
from larder.core.types import NamedTensors
from larder.policy.providers._layer_gates import perceptron_gate
from larder.training.base import LayerData, Method, fit_by_gradient
from larder.training.labels import LOGIT
from larder.training.methods._perceptron import Standardization, first_tensors, unscaled


@dataclass(frozen=True)
class LocretHeads(Method):
    """Perceptron with SiLU, by AdamW on whole passages of text.

    Args:
        inner: inner size; 1,024 in the paper.
        smoothing: weight of the squared difference of neighboring scores.
        rate: highest learning rate.
        window: successive tokens of a step.
    """

    inner: int = 128
    smoothing: float = 0.0025
    epochs: int = 10
    rate: float = 5e-3
    window: int = 256
    label = LOGIT

    def __post_init__(self) -> None:
        if self.inner < 1 or self.epochs < 1 or self.window < 2 or not self.rate > 0:
            raise BadParameter(f"locret needs numbers above 0, and windows above 1, got {self}.")

    def target(self, labels: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
        return labels

    def fit(self, data: LayerData, layer: LayerSpec, seed: int) -> dict[str, Tensor]:
        inputs, outputs = Standardization.of(data.states), Standardization.of(data.targets)
        states, targets = inputs.apply(data.states), outputs.apply(data.targets)

        def loss(tensors: NamedTensors, rows: Tensor) -> Tensor:
            predicted = perceptron_gate(states[rows], tensors, F.silu)
            rough = (predicted[1:] - predicted[:-1]).square().mean()
            return F.smooth_l1_loss(predicted, targets[rows]) + self.smoothing * rough

        def batches(source: torch.Generator) -> Sequence[Tensor]:
            windows = self._windows(data.lengths)
            order = torch.randperm(len(windows), generator=source).tolist()
            return [windows[index] for index in order]

        fitted = fit_by_gradient(
            first_tensors(states.shape[1], self.inner, layer.kv_heads, seed),
            loss,
            batches,
            epochs=self.epochs,
            rate=self.rate,
            seed=seed,
        )
        return unscaled(fitted, inputs, outputs)

    def _windows(self, lengths: tuple[int, ...]) -> list[Tensor]:
        """Rows of successive tokens of one passage, two at least."""
        passages = torch.arange(sum(lengths)).split(list(lengths))
        windows = [own for passage in passages for own in passage.split(self.window)]
        return [window for window in windows if len(window) > 1]


Part = LocretHeads
