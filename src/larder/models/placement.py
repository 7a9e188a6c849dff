"""Placement of the weights of a model by accelerate: on devices, and offloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from larder.core.arguments import check_type
from larder.core.errors import BadParameter, ModelError
from larder.core.spec import ModelSpec

if TYPE_CHECKING:
    from larder.models.decoder import Decoder

FIRST_PAGES = 4  # pages per kv head that an arena begins with
MOST_PAGES = 2**31 // 256  # rows of a layer are counted in int32

META = "meta"  # device of weights that accelerate loads while their module is called


# `auto`, a device, or a device by name of a part of the model, as transformers takes it.
DeviceMap = str | int | torch.device | Mapping[str, str | int | torch.device]
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
EXAMPLES = "device_map='auto', device_map={'': 'cuda:0'}, or {'model.layers.0': 'cpu', ...}"


def check_device_map(device_map: DeviceMap) -> None:
    """Check a device map before a model is loaded.

    Raises:
        BadParameter: it is neither a strategy of accelerate, a device of this machine, nor a
            device or `disk` by part of the model.
    """
    if device_map in STRATEGIES:
        return
    if not isinstance(device_map, Mapping):
        _check_device(device_map, "")
        return
    if not device_map:
        raise BadParameter(f"device_map is empty: give a device for each part, as {EXAMPLES}.")
    for part, device in device_map.items():
        if device != "disk":
            _check_device(device, f" of the part {part!r}")


def check_parts(model: nn.Module, device_map: DeviceMap) -> None:
    """Check that the parts of a device map are parts of a model.

    Raises:
        BadParameter: the model has no part of a name.
    """
    if not isinstance(device_map, Mapping):
        return
    weights = (*model.named_parameters(), *model.named_buffers())
    known = {name for name, _ in (*model.named_modules(), *weights)} - {""}
    for part in device_map:
        if part and part not in known:
            near = get_close_matches(part, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else "model.named_modules() names them."
            raise BadParameter(f"device_map names {part!r}, which is no part of the model: {hint}")


def _check_device(device: object, part: str) -> None:
    """Raise BadParameter unless a device computes on this machine."""
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise BadParameter(
            f"The device{part} in device_map must be a name such as cuda:0, a number or a "
            f"torch.device, got {device!r}: give {EXAMPLES}."
        )
    try:
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise BadParameter(
            f"The device{part} in device_map must be one of {', '.join(STRATEGIES)} for the whole "
            f"map, or a device that torch knows, such as cpu or cuda:0, got {device!r}: give "
            f"{EXAMPLES}."
        ) from error
    if target.type == META:
        raise BadParameter(
            f"The device{part} in device_map must be one that computes, got {device!r}, where "
            f"tensors have shapes but no numbers: give {EXAMPLES}."
        )
    count = torch.cuda.device_count()
    if target.type == "cuda" and (target.index or 0) >= count:
        raise BadParameter(
            f"The device{part} in device_map is {device!r}, but this machine has {count} CUDA "
            f"devices: give {EXAMPLES}."
        )


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
    """Check that all weights have numbers.

    Raises:
        ModelError: a weight has none.
    """
    for weight in model.named_parameters():
        if compute_device(model, *weight).type == META:
            loaded_tensor(model, *weight)  # raises


def check_devices(model: nn.Module, spec: ModelSpec) -> None:
    """Check that layers on several devices are ones whose caches may be.

    Raises:
        ModelError: recurrent layers, whose states are held on one device.
    """
    if spec.layer_devices and spec.recurrent:
        found = ", ".join(dict.fromkeys(map(str, spec.layer_devices)))
        raise ModelError(
            f"The layers of {type(model).__name__} are computed on {found}, but states of "
            "recurrent layers lie on one device: name one for all layers "
            "(device_map={'': DEVICE}), and offload with 'cpu' or 'disk' those that do not fit."
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


class PageUse(Enum):
    """Choice of the caches that are held in pages.

    AUTO: those of a model on one CUDA device.
    ON: those on any device.
    OFF: none.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def page_use(name: str, option: str = "pages") -> PageUse:
    """Use of pages by its name.

    Args:
        option: where the name was given, for the message.

    Raises:
        BadParameter: it is no use of pages.
    """
    check_type(option, name, str, "auto, on or off")
    if name not in {use.value for use in PageUse}:
        raise BadParameter(f"{option} must be auto, on or off, got {name!r}.")
    return PageUse(name)


def set_pages(decoder: Decoder, use: PageUse) -> None:
    """Use pages for the caches of a decoder that are made from now on, or do not.

    Layers without pages, as those with a sliding window, hold their entries as before.
    """
    is_cuda = decoder.spec.device.type == "cuda"
    is_fit = is_cuda and not decoder.spec.layer_devices
    if use is PageUse.OFF or (use is PageUse.AUTO and not is_fit):
        decoder.use_pages(None)
        return
    from larder.cache.page_arena import PageArena, can_page

    heads = [layer.kv_heads for layer in decoder.spec.layers if can_page(layer)]
    if not heads:
        decoder.use_pages(None)
        return
    arena = PageArena(decoder.spec, FIRST_PAGES * max(heads), max_pages=MOST_PAGES)
    if not is_cuda:
        decoder.use_pages(arena)
        return
    from larder.models.decode_graph import CudaGraphCapture

    decoder.use_pages(arena, CudaGraphCapture())
