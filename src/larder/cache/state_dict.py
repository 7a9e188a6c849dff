"""State dictionary of a sequence's layers: tensors by name, saving, moving and restoring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from larder.cache.entry_columns import column_names, is_latest_queries
from larder.cache.forms.base import CacheLayer
from larder.cache.spec import CacheSpec, create_layer
from larder.cache.validation import check_ledger
from larder.core.errors import CacheError
from larder.core.spec import ModelSpec


def state_dict(layers: Sequence[CacheLayer]) -> dict[str, Tensor]:
    """Copies of all tensors, without slack, named `<layer>.<tensor>`."""
    return {
        f"{index}.{name}": tensor
        for index, layer in enumerate(layers)
        for name, tensor in layer.state().items()
    }


def layer_of(name: str) -> int | None:
    """Layer index of a state name; None for tensors of no layer."""
    index = name.partition(".")[0]
    return int(index) if index.isdecimal() else None


def move_state(
    layers: list[CacheLayer], cache_spec: CacheSpec, spec: ModelSpec, device: torch.device
) -> dict[str, Tensor]:
    """All tensors, moved to `device` layer by layer; the layers are empty afterwards.

    At most one layer is held twice. On an interruption the layers are restored, but not linked.
    """
    moved: dict[str, Tensor] = {}
    given: list[int] = []
    try:
        for index, layer in enumerate(layers):
            state = layer.state()
            moved |= {f"{index}.{name}": state[name].to(device) for name in state}
            layers[index] = create_layer(layer.layer, spec, cache_spec)
            given.append(index)
    except BaseException:
        for index in given:
            empty = layers[index]
            layers[index] = empty.adopted(_layer_state(moved, index, empty, spec))
        raise
    return moved


def restore_layers(
    layers: Sequence[CacheLayer],
    cache_spec: CacheSpec,
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    fill: Callable[[CacheLayer, dict[str, Tensor]], CacheLayer],
) -> list[CacheLayer]:
    """Layers restored from a saved state; the caller links them.

    Raises:
        CacheError: a layer is missing, or does not match the cache specification.
    """
    full: list[CacheLayer] = []
    for index, layer in enumerate(layers):
        layer_state = _layer_state(state, index, layer, spec)
        if not layer_state and layer.layer.kv_source is None:
            raise CacheError(
                f"The saved cache has no layer {index}, but the model has "
                f"{len(spec.layers)} layers: it belongs to another model."
            )
        if layer.layer in spec.managed:
            _check_layer(cache_spec, index, layer_state)
        full.append(fill(layer, layer_state))
    return full


def _layer_state(
    state: Mapping[str, Tensor], index: int, layer: CacheLayer, spec: ModelSpec
) -> dict[str, Tensor]:
    """Tensors of one layer on its device; lengths and the slow tier stay on the host."""
    prefix = f"{index}."
    own = {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix) and not is_latest_queries(name)
    }
    host = {n for n in own if n.endswith("lengths") or layer.is_slow_state(n)}
    device = spec.device_of(index)
    return {n: t.to(torch.device("cpu") if n in host else device) for n, t in own.items()}


def _check_layer(cache_spec: CacheSpec, index: int, state: Mapping[str, Tensor]) -> None:
    """Check a saved managed layer against the cache specification.

    Raises:
        CacheError: columns or precision grades differ.
    """
    check_ledger(cache_spec.ledger, index, column_names(state))
    if not (cache_spec.codecs or any(name.startswith("grade") for name in state)):
        return
    from larder.cache.quantized_tier import saved_codecs  # not before quantized tiers are restored

    found = saved_codecs(state)
    if found != cache_spec.codecs:
        raise CacheError(
            f"Layer {index} of the saved cache has {len(found)} quantized grades, but these are "
            f"not the {len(cache_spec.codecs)} of its description: build the cache again."
        )
