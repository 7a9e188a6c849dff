"""Fast KVzip: low-rank gates that predict KVzip's score.

Kim et al., "Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction" (2026),
arXiv:2601.17668: 16 channels and 16 sinks. The loss is the cross-entropy of the gate against the
score, which is a share between 0 and 1; the paper does not print its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.spec import LayerSpec
from larder.core.types import NamedTensors
from larder.policy.providers.fast_kvzip import low_rank_gate
from larder.training.base import LayerData, Method, fit_by_gradient
from larder.training.labels import WEIGHT
from larder.training.methods._perceptron import shuffled_batches

EDGE = 1e-6  # of predictions from 0 and 1, in the loss


@dataclass(frozen=True)
class FastKVzipGates(Method):
    """Gates by AdamW on cross-entropy.

    Args:
        channels: of the gate's queries and keys.
        sinks: learned keys that a token competes with.
        rate: highest learning rate.
        batch: tokens of a step.
    """

    channels: int = 16
    sinks: int = 16
    epochs: int = 10
    rate: float = 2e-3
    batch: int = 512
    label = WEIGHT

    def __post_init__(self) -> None:
        sizes = (self.channels, self.sinks, self.epochs, self.batch)
        if min(sizes) < 1 or not self.rate > 0:
            raise BadParameter(f"fast_kvzip needs numbers above 0, got {self}.")

    def target(self, labels: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
        return labels

    def fit(self, data: LayerData, layer: LayerSpec, seed: int) -> dict[str, Tensor]:
        states, targets = data.states, data.targets

        def loss(tensors: NamedTensors, rows: Tensor) -> Tensor:
            predicted = low_rank_gate(states[rows], tensors).clamp(EDGE, 1 - EDGE)
            return F.binary_cross_entropy(predicted, targets[rows].clamp(0, 1))

        return fit_by_gradient(
            self._first_tensors(states.shape[1], layer, seed),
            loss,
            partial(shuffled_batches, len(states), self.batch),
            epochs=self.epochs,
            rate=self.rate,
            seed=seed,
        )

    def _first_tensors(self, width: int, layer: LayerSpec, seed: int) -> dict[str, Tensor]:
        source = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=source) / math.sqrt(width)

        heads, channels = layer.query_heads, self.channels
        return {
            "q_proj.weight": draw(heads * channels, width),
            "q_proj.bias": torch.zeros(heads * channels),
            "k_proj.weight": draw(layer.kv_heads * channels, width),
            "q_norm.weight": torch.ones(channels),
            "k_norm.weight": torch.ones(channels),
            "k_base": torch.randn(layer.kv_heads, 1, self.sinks, channels, generator=source),
            "b": torch.zeros(layer.kv_heads, 1, layer.group),
        }


Part = FastKVzipGates
