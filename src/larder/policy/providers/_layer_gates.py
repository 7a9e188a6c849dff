"""Gates over one hidden state: a linear map, or two with a nonlinearity between them.

Tensors are named as those of `torch.nn.Linear`, and of a `torch.nn.Sequential` of two with an
activation between them, as released weights of KVzap are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from larder.core.spec import LayerSpec

FIRST, LAST = "0", "2"  # places of the linear maps in the sequence

Shapes = dict[str, tuple[int, ...]]


def linear_shapes(layer: LayerSpec, width: int) -> Shapes:
    """Shapes of a linear map to one number per kv head."""
    return {"weight": (layer.kv_heads, width), "bias": (layer.kv_heads,)}


def linear_gate(
    states: Float[Tensor, "Q hidden"], weights: Mapping[str, Tensor]
) -> Float[Tensor, "Q K"]:
    """Linear map, in float32."""
    return F.linear(states.float(), weights["weight"], weights["bias"])


def perceptron_shapes(layer: LayerSpec, width: int, given: Mapping[str, Tensor]) -> Shapes:
    """Shapes of two linear maps; the size between them is that of the given tensors."""
    bias = given.get(f"{FIRST}.bias")
    inner = 0 if bias is None else bias.numel()
    return {
        f"{FIRST}.weight": (inner, width),
        f"{FIRST}.bias": (inner,),
        f"{LAST}.weight": (layer.kv_heads, inner),
        f"{LAST}.bias": (layer.kv_heads,),
    }


def perceptron_gate(
    states: Float[Tensor, "Q hidden"],
    weights: Mapping[str, Tensor],
    activation: Callable[[Tensor], Tensor],
) -> Float[Tensor, "Q K"]:
    """Two linear maps with an activation between them, in float32."""
    inner = F.linear(states.float(), weights[f"{FIRST}.weight"], weights[f"{FIRST}.bias"])
    return F.linear(activation(inner), weights[f"{LAST}.weight"], weights[f"{LAST}.bias"])
