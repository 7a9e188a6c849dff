"""Placement of the weights of a model by accelerate: on one device, with others offloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from larder.core.errors import ModelError

META = "meta"  # device of weights that accelerate loads while their module is called


def compute_device(model: nn.Module, name: str, weight: Tensor) -> torch.device:
    """Device that a weight of a model is computed with, also while it is offloaded; meta for a
    weight without numbers.
    """
    found = _offload(model, name) if weight.device.type == META else None
    return weight.device if found is None else torch.device(found[0].execution_device)


def input_placement(model: Any) -> tuple[torch.dtype, torch.device]:
    """Dtype of a model's input embeddings, and the device that they are computed on."""
    table = model.get_input_embeddings()
    return table.weight.dtype, compute_device(table, "weight", table.weight)


def loaded_tensor(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Weight of a model with its numbers, which an offloaded weight is without.

    Raises:
        ModelError: the weight has no numbers.
    """
    if tensor.device.type != META:
        return tensor.detach()
    found = _offload(model, name)
    if found is None:
        raise ModelError(
            f"The weight {name} of {type(model).__name__} lies on meta, where tensors have shapes "
            "but no numbers: load it with its weights, as from_pretrained(device_map='cpu') does."
        )
    hook, own = found
    return hook.weights_map[own]


def loaded_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers by name; offloaded ones are loaded one by one."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, loaded_tensor(model, name, tensor)


@contextmanager
def weights_loaded(part: nn.Module) -> Iterator[None]:
    """Context in which a part of a model has its offloaded weights, as during a call of it."""
    loading = [(hook, each) for each in part.modules() for hook in _offloading_hooks(each)]
    for hook, each in loading:
        hook.pre_forward(each)
    try:
        yield
    finally:
        for hook, each in loading:
            hook.post_forward(each, None)


def check_placement(model: nn.Module) -> None:
    """Check that all weights have numbers, and that one device computes with them.

    Raises:
        ModelError: a weight has none, or layers are computed on several devices.
    """
    devices = set[str]()
    for weight in model.named_parameters():
        device = compute_device(model, *weight)
        if device.type == META:
            loaded_tensor(model, *weight)  # raises
        devices.add(str(device))
    if len(devices) > 1:
        found = ", ".join(sorted(devices))
        raise ModelError(
            f"The layers of {type(model).__name__} are computed on {found}, but Larder's caches "
            "lie on one device: name one for all layers (device_map={'': DEVICE}), "
            "and offload with 'cpu' or 'disk' those that do not fit."
        )


def is_offloaded(module: nn.Module) -> bool:
    """True if accelerate loads weights of a module when it is called."""
    return bool(_offloading_hooks(module))


def _offload(model: nn.Module, name: str) -> tuple[Any, str] | None:
    """Hook of accelerate that loads a weight, on its module or one around it, and its name there;
    None if no hook does.
    """
    path, inner = name.split("."), len(name.split(".")) - 1
    for depth in range(inner, -1, -1):
        for hook in _offloading_hooks(model.get_submodule(".".join(path[:depth]))):
            return hook, ".".join(path[depth:])
    return None


def _offloading_hooks(part: nn.Module) -> list[Any]:
    """Hooks of accelerate that load weights of a module for a call of it."""
    hook = vars(part).get("_hf_hook")
    hooks = vars(hook).get("hooks", (hook,)) if hook is not None else ()
    return [each for each in hooks if vars(each).get("weights_map") is not None]
