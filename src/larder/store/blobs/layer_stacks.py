"""Layers of a cache state that a codec codes jointly: those whose heads hold the same tokens.

Layers held in fast memory are one stack, their offloaded entries ("slow.") another. Positions are
stored with the first layer of a stack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from larder.core.errors import CacheError, Damaged
from larder.store.blobs.container import DTYPE_NAMES, DTYPES
from larder.store.codecs.base import CodedStack, LayerStack, StorageCodec, TensorRole, codec_named

PREFIXES = ("", "slow.")  # of the names of keys, values, lengths and positions in a layer
ROLES = (TensorRole.KEYS, TensorRole.VALUES)
STACK = "stack"  # in the metadata of a tensor: prefix, and of the first one the codec's note
POSITIONS, SAME = "positions", "same"  # SAME: of a layer whose positions are those of the first


@dataclass(frozen=True)
class _StackedLayer:
    """Layer of a state whose heads all hold the same tokens.

    Args:
        index: of the layer.
        sides: keys and values by kv head.
        keys: names of both in the state.
    """

    index: int
    sides: dict[TensorRole, Tensor]
    keys: dict[TensorRole, str]
    positions: Int[Tensor, " S"]


def encode_stacks(
    state: Mapping[str, Tensor], codec: StorageCodec, name: str, model: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of the stacks that a codec codes jointly; nothing if it codes none.

    Args:
        name: name of the codec.
        model: fingerprint.
    """
    tensors, coded = dict[str, Tensor](), dict[str, Any]()
    for prefix in PREFIXES if codec.spans_layers else ():
        layers = _stack(state, prefix)
        if not layers:
            continue
        stack = LayerStack(tuple(layer.sides for layer in layers), layers[0].positions, model)
        try:
            found = codec.encode_stack(stack)
        except CacheError:
            continue
        if not found.sides:
            continue
        for own, sides in zip(layers, found.sides, strict=False):
            for role, parts in sides.items():
                key = own.keys[role]
                tensors |= {f"{key}:{short}": part for short, part in parts.items()}
                coded[key] = _description(state[key], own.sides[role], name)
                coded[key][STACK] = {"prefix": prefix}
        coded[layers[0].keys[TensorRole.KEYS]][STACK]["note"] = dict(found.note)
        for own in layers[1:]:
            key = f"{own.index}.{prefix}{POSITIONS}"
            coded[key] = _size_of(state[key]) | {STACK: {"prefix": prefix, SAME: True}}
    return tensors, coded


def decode_stacks(tensors: Mapping[str, Tensor], coded: Mapping[str, Any]) -> dict[str, Tensor]:
    """Keys and values of jointly coded layers, by name.

    Args:
        tensors: with the positions of each layer as they are.
        coded: metadata of the coded tensors alone, whose sizes are checked.

    Raises:
        Damaged: codes and metadata do not match.
    """
    state = dict[str, Tensor]()
    try:
        for prefix in PREFIXES:
            own = {key: how for key, how in coded.items() if how[STACK]["prefix"] == prefix}
            sides = {key: how for key, how in own.items() if SAME not in how[STACK]}
            if own:
                state |= _decoded(tensors, sides, prefix)
                repeated = {key: how for key, how in own.items() if key not in sides}
                state |= _repeated(tensors, sides, repeated, prefix)
        if len(state) != len(coded):
            raise Damaged("Jointly coded tensors of a saved cache belong to no stack.")
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise Damaged(f"Layers of a saved cache cannot be decoded ({error}).") from error
    return state


def _decoded(
    tensors: Mapping[str, Tensor], coded: Mapping[str, Any], prefix: str
) -> dict[str, Tensor]:
    layers = sorted({int(key.partition(".")[0]) for key in coded})
    keys = [{role: f"{layer}.{prefix}{role.value}" for role in ROLES} for layer in layers]
    first = coded[keys[0][TensorRole.KEYS]]
    sides, heads = list[Mapping[TensorRole, Mapping[str, Tensor]]](), list[int]()
    for names in keys:
        for name in names.values():
            how = coded[name]
            lengths = how["lengths"]
            if how["codec"] != first["codec"] or set(lengths) != {first["lengths"][0]}:
                raise Damaged(f"{name} of a saved cache is not of the stack that it is coded in.")
            if sum(lengths) != math.prod(how["shape"][:-1]):
                raise Damaged(f"{name} of a saved cache cannot have heads of {lengths} entries.")
        heads.append(len(coded[names[TensorRole.KEYS]]["lengths"]))
        sides.append({role: _parts(tensors, name) for role, name in names.items()})
    length = first["lengths"][0]
    positions = tensors[f"{layers[0]}.{prefix}positions"].flatten()[:length].cpu()
    note = first[STACK]["note"]
    stack = CodedStack(tuple(sides), note)
    decoded = codec_named(first["codec"]).decode_stack(stack, positions, heads)
    state = dict[str, Tensor]()
    for names, tensors_by_role in zip(keys, decoded, strict=True):
        for role, name in names.items():
            how = coded[name]
            state[name] = (
                tensors_by_role[role].to(DTYPES[how["dtype"]]).reshape(tuple(how["shape"]))
            )
    return state


def _repeated(
    tensors: Mapping[str, Tensor],
    sides: Mapping[str, Any],
    repeated: Mapping[str, Any],
    prefix: str,
) -> dict[str, Tensor]:
    """Positions of layers: those of the first layer of the stack, once or once per head."""
    first = min(int(key.partition(".")[0]) for key in sides)
    length = sides[f"{first}.{prefix}{TensorRole.KEYS.value}"]["lengths"][0]
    held = tensors[f"{first}.{prefix}{POSITIONS}"].flatten()[:length]
    found = dict[str, Tensor]()
    for name, how in repeated.items():
        shape = tuple(how["shape"])
        copies = math.prod(shape) // max(length, 1)
        found[name] = held.repeat(copies).to(DTYPES[how["dtype"]]).reshape(shape)
    return found


def _parts(tensors: Mapping[str, Tensor], key: str) -> dict[str, Tensor]:
    """Coded tensors of a key by short name."""
    found = (name for name in tensors if name.startswith(f"{key}:"))
    return {name.removeprefix(f"{key}:"): tensors[name] for name in found}


def _stack(state: Mapping[str, Tensor], prefix: str) -> list[_StackedLayer]:
    """Layers in order, if all of them hold the same tokens in every head; else none."""
    found = list[_StackedLayer]()
    for layer in sorted({int(number) for number in _layers_with(state, f"{prefix}keys")}):
        own = _stacked_layer(state, layer, prefix)
        if own is None or not torch.equal(own.positions, (found or [own])[0].positions):
            return []
        found.append(own)
    return found


def _layers_with(state: Mapping[str, Tensor], part: str) -> Iterator[str]:
    for name in state:
        layer, _, rest = name.partition(".")
        if rest == part:
            yield layer


def _stacked_layer(state: Mapping[str, Tensor], layer: int, prefix: str) -> _StackedLayer | None:
    """Layer of a state; None if its heads hold different tokens, or it has no values."""
    names = {role: f"{layer}.{prefix}{role.value}" for role in ROLES}
    sides = {role: state[name].cpu() for role, name in names.items() if name in state}
    positions = state.get(f"{layer}.{prefix}positions")
    if len(sides) < len(ROLES) or positions is None:
        return None
    if not all(side.is_floating_point() for side in sides.values()):
        return None
    positions = positions.cpu()
    if sides[TensorRole.KEYS].ndim == 3:
        return _StackedLayer(layer, sides, names, positions)
    lengths = state.get(f"{layer}.{prefix}lengths")
    counts = [] if lengths is None else lengths.tolist()
    if len(set(counts)) != 1 or not counts[0]:
        return None
    each = positions.unflatten(0, (len(counts), -1))
    if not torch.equal(each, each[:1].expand_as(each)):
        return None
    by_head = {role: side.unflatten(0, (len(counts), -1)) for role, side in sides.items()}
    return _StackedLayer(layer, by_head, names, each[0])


def _size_of(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}


def _description(tensor: Tensor, by_head: Tensor, name: str) -> dict[str, Any]:
    lengths = [by_head.shape[1]] * by_head.shape[0]
    return _size_of(tensor) | {"codec": name, "lengths": lengths}
