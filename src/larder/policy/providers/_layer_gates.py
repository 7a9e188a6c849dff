"""Gates over one hidden state by two linear maps with an activation between them.

Tensors are named as those of a `torch.nn.Sequential` of both, as released weights of KVzap are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from larder.core.spec import LayerSpec
from larder.core.types import HiddenStates, NamedTensors, TensorShapes
from larder.policy.providers.base import GateProvider

FIRST, LAST = "0", "2"  # places of the linear maps in the sequence


class PerceptronGate(GateProvider, ABC):
    """Base of gates by a perceptron, whose inner size is that of the given tensors."""

    @property
    @abstractmethod
    def activation(self) -> Callable[[Tensor], Tensor]:
        """Activation between both maps."""

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        bias = tensors.get(f"{FIRST}.bias")
        inner = 0 if bias is None else bias.numel()
        return {
            f"{FIRST}.weight": (inner, width),
            f"{FIRST}.bias": (inner,),
            f"{LAST}.weight": (layer.kv_heads, inner),
            f"{LAST}.bias": (layer.kv_heads,),
        }

    def gate(self, states: HiddenStates, weights: NamedTensors) -> Float[Tensor, "Q K"]:
        return perceptron_gate(states, weights, self.activation)


def perceptron_gate(
    states: HiddenStates, weights: NamedTensors, activation: Callable[[Tensor], Tensor]
) -> Float[Tensor, "Q K"]:
    """Two linear maps with an activation between them, in float32."""
    inner = F.linear(states.float(), weights[f"{FIRST}.weight"], weights[f"{FIRST}.bias"])
    return F.linear(activation(inner), weights[f"{LAST}.weight"], weights[f"{LAST}.bias"])
