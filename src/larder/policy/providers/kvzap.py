"""Provider of KVzap's linear prediction of the logarithm of KVzip+'s score.

Jegou and Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning" (2026), arXiv:2601.07891.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from larder.core.spec import LayerSpec
from larder.core.types import HiddenStates, NamedTensors, TensorShapes
from larder.policy.providers.base import GateProvider


class KVzapLinear(GateProvider):
    """Column `kvzap`: one linear map per layer, fitted by ridge regression."""

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        return {"weight": (layer.kv_heads, width), "bias": (layer.kv_heads,)}

    def gate(self, states: HiddenStates, weights: NamedTensors) -> Float[Tensor, "Q K"]:
        return F.linear(states.float(), weights["weight"], weights["bias"])


Part = KVzapLinear
