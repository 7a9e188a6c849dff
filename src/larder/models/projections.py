"""The matrix behind each layer's attention: what it makes of the output of every query head."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from larder.core.errors import ModelError
from larder.models.decoder import Decoder
from larder.models.prefetch import attention_modules

OUTPUT_PROJECTION_NAMES = (
    "o_proj",
    "out_proj",
    "dense",
    "c_proj",
    "wo",
)  # of the output projection, by architecture


@torch.no_grad()
def output_projections(decoder: Decoder) -> dict[int, Float[Tensor, "H D N"]]:
    """The output projection of every layer, by layer index: views of the model's weights.

    Raises:
        ModelError: an attention module has no linear map of a known name and of the right size.
    """
    modules = attention_modules(decoder.body)
    found: dict[int, Tensor] = {}
    for layer in decoder.spec.layers:
        shape = layer.query_heads, layer.head_dim
        weight = _output_weight(modules[layer.index], shape[0] * shape[1])
        found[layer.index] = weight.detach().unflatten(1, shape).permute(1, 2, 0)
    return found


def _output_weight(module: nn.Module, width: int) -> Float[Tensor, "N W"]:
    children = dict(module.named_children())
    for name in OUTPUT_PROJECTION_NAMES:
        child = children.get(name)
        if isinstance(child, nn.Linear) and child.in_features == width:
            return child.weight
    raise ModelError(
        f"{type(module).__name__} has no linear output projection from {width} channels among "
        f"{', '.join(children) or 'nothing'}: take a policy without criticality()."
    )
