"""Matrix of a linear module, whatever its weight is held as."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def linear_weight(linear: Any, rows: Float[Tensor, "_ W"]) -> Float[Tensor, "N W"]:
    """Matrix by which a linear module multiplies, by reference where its weight is plain.

    Quantized, adapted and offloaded weights are read by what the module makes of unit vectors.

    Args:
        linear: module of W channels.
        rows: any rows that the module takes; they are not read.
    """
    if is_plain(linear):
        return linear.weight.detach()
    unit = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    none = torch.zeros_like(unit[:1])
    with torch.no_grad():
        return (linear(unit) - linear(none)).T


def is_plain(linear: Any) -> bool:
    """True for a linear module of torch with numbers in a tensor of torch."""
    return (
        type(linear) is nn.Linear
        and not is_traceable_wrapper_subclass(linear.weight)
        and linear.weight.is_floating_point()
        and linear.weight.device.type != "meta"
    )
