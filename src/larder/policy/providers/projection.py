"""Provider of the output projection of a layer's attention, one matrix per query head."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from larder.core.errors import ModelError
from larder.core.spec import LayerSpec
from larder.policy.providers.base import WeightProvider

OUTPUT_PROJECTION_NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")


class Projection(WeightProvider):
    """Input `projection` [H, D, hidden], a view of the model's weights where these are plain."""

    def layer_tensor(self, attention: nn.Module, layer: LayerSpec) -> Float[Tensor, "H D N"]:
        shape = layer.query_heads, layer.head_dim
        weight = _output_weight(attention, shape[0] * shape[1])
        return weight.detach().unflatten(1, shape).permute(1, 2, 0)  # pyright: ignore


def _output_weight(module: nn.Module, width: int) -> Float[Tensor, "N W"]:
    children = dict(module.named_children())
    for name in OUTPUT_PROJECTION_NAMES:
        child = children.get(name)
        if child is not None and vars(child).get("in_features") == width:
            from larder.ops.linear_weight import linear_weight

            return linear_weight(child, _no_rows(child, width))
    raise ModelError(
        f"{type(module).__name__} has no linear output projection from {width} channels among "
        f"{', '.join(children) or 'nothing'}: choose a policy without criticality()."
    )


def _no_rows(linear: nn.Module, width: int) -> Float[Tensor, "0 W"]:
    """Rows of a dtype and on a device that a linear module takes."""
    weights = [*linear.parameters()]
    dtypes = [weight.dtype for weight in weights if weight.is_floating_point()]
    devices = [weight.device for weight in weights if weight.device.type != "meta"]
    return torch.empty(0, width, dtype=(dtypes or [None])[0], device=(devices or [None])[0])


Part = Projection
