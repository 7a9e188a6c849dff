"""Provider of global retention: how slowly an entry loses its worth, comparable between all heads.

Bui et al., "Make Each Token Count: Towards Improving Long-Context Performance with KV Cache
Eviction" (2026), arXiv:2605.09649. As TRIM-KV's gate, with a last projection from a few channels to
log beta that all layers and heads share, so that they answer on one scale. The weights file repeats
the projection in every layer, and one whose layers differ is refused.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from larder.core.spec import LayerSpec
from larder.core.types import HiddenStates, NamedTensors, TensorShapes
from larder.policy.providers._layer_gates import FIRST, LAST, perceptron_gate
from larder.policy.providers.base import GateProvider

SHARED = "4"  # place of the shared projection in the sequence


class SharedRetentionGate(GateProvider):
    """Column `global_retention`: log beta, at most 0.

    Per layer a linear map, SiLU, a linear map to some channels of each kv head, and SiLU; then the
    shared map of a head's channels, and log-sigmoid.
    """

    shared = frozenset({f"{SHARED}.weight", f"{SHARED}.bias"})

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        inner, channels = (
            tensors[name].numel() if name in tensors else 0
            for name in (f"{FIRST}.bias", f"{SHARED}.weight")
        )
        return {
            f"{FIRST}.weight": (inner, width),
            f"{FIRST}.bias": (inner,),
            f"{LAST}.weight": (layer.kv_heads * channels, inner),
            f"{LAST}.bias": (layer.kv_heads * channels,),
            f"{SHARED}.weight": (1, channels),
            f"{SHARED}.bias": (1,),
        }

    def gate(self, states: HiddenStates, weights: NamedTensors) -> Float[Tensor, "Q K"]:
        weight = weights[f"{SHARED}.weight"]
        flat = F.silu(perceptron_gate(states, weights, F.silu))
        channels = flat.view(len(flat), -1, weight.shape[1])  # [Q, K, c]
        return F.logsigmoid(F.linear(channels, weight, weights[f"{SHARED}.bias"])[..., 0])


Part = SharedRetentionGate
