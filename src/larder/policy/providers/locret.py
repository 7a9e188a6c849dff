"""Provider of Locret's prediction of the highest logit that later tokens give an entry.

Huang et al., "Locret: Enhancing Eviction in Long-Context LLM Inference with Trained Retaining Heads
on Consumer-Grade Devices" (2024), arXiv:2410.01805. A retaining head reads queries, keys and values
before rotation. These are linear in the hidden state, so its first map is taken together with the
projections: a map from the hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from larder.core.spec import LayerSpec
from larder.policy.providers._layer_gates import perceptron_gate, perceptron_shapes
from larder.policy.providers.base import GateProvider


class RetainingHead(GateProvider):
    """Column `locret`: per layer a linear map, SiLU, and a linear map."""

    def shapes(
        self, layer: LayerSpec, width: int, given: Mapping[str, Tensor]
    ) -> dict[str, tuple[int, ...]]:
        return perceptron_shapes(layer, width, given)

    def gate(
        self, states: Float[Tensor, "Q hidden"], weights: Mapping[str, Tensor]
    ) -> Float[Tensor, "Q K"]:
        return perceptron_gate(states, weights, F.silu)


Part = RetainingHead
