"""Provider of KVzap's prediction of the logarithm of KVzip+'s score, by a perceptron.

Jegou and Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning" (2026), arXiv:2601.07891.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from larder.core.spec import LayerSpec
from larder.policy.providers._layer_gates import perceptron_gate, perceptron_shapes
from larder.policy.providers.base import GateProvider


class KVzapPerceptronGate(GateProvider):
    """Column `kvzap_mlp`: per layer a linear map, GELU, and a linear map."""

    def shapes(
        self, layer: LayerSpec, width: int, given: Mapping[str, Tensor]
    ) -> dict[str, tuple[int, ...]]:
        return perceptron_shapes(layer, width, given)

    def gate(
        self, states: Float[Tensor, "Q hidden"], weights: Mapping[str, Tensor]
    ) -> Float[Tensor, "Q K"]:
        return perceptron_gate(states, weights, F.gelu)


Part = KVzapPerceptronGate
