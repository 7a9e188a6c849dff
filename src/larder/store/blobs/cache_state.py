"""Cache states encoded by a codec: keys and values are coded, everything else is copied.

A codec may code layers jointly whose heads hold the same tokens. Layers held in fast memory are one
stack, their offloaded entries ("slow.") another. Positions are stored with the first layer of a
stack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from larder.cache.entry_columns import TAIL
from larder.cache.sequence import SequenceCache
from larder.core.errors import CacheError, Damaged
from larder.core.spec import ModelSpec
from larder.store.blobs.container import DTYPE_NAMES, DTYPES
from larder.store.codecs.base import (
    CodedStack,
    LayerStack,
    RowLayout,
    StorageCodec,
    TensorRole,
    codec_named,
)

RAW_CODEC = "raw"
# Coded tensors of a layer's state, and the tensor of the lengths of their heads.
_ENCODED_TENSORS = {
    "keys": (TensorRole.KEYS, "lengths"),
    "values": (TensorRole.VALUES, "lengths"),
    "slow.keys": (TensorRole.KEYS, "slow.lengths"),
    "slow.values": (TensorRole.VALUES, "slow.lengths"),
}
EncodedState = tuple[dict[str, Tensor], dict[str, Any]]
SNAPSHOT_PART_BYTES = 32 * 2**20  # largest blob of a snapshot, unless a single layer is larger
PREFIXES = ("", "slow.")  # of the names of keys, values, lengths and positions in a layer
ROLES = (TensorRole.KEYS, TensorRole.VALUES)
STACK = "stack"  # in the metadata of a tensor: prefix, and of the first one the codec's note
POSITIONS, SAME = "positions", "same"  # SAME: of a layer whose positions are those of the first


def encode_state(
    state: Mapping[str, Tensor], codec: StorageCodec, name: str, spec: ModelSpec
) -> EncodedState:
    """Encode a cache state; return tensors and JSON-compatible metadata for decoding.

    Numbers that the codec cannot hold, because one is not finite, are kept as they are.

    Args:
        state: from `SequenceCache.state`, all layers or some.
        name: name of the codec.
        spec: of the model.
    """
    layers = len(spec.layers)
    tensors, coded = encode_stacks(state, codec, name, spec.fingerprint)
    for key, tensor in state.items():
        layer, _, part = key.partition(".")
        if key in coded:
            continue
        if codec.lossless or part not in _ENCODED_TENSORS or not tensor.is_floating_point():
            tensors[key] = tensor
            continue
        role, lengths = _ENCODED_TENSORS[part]
        rows = _row_layout(tensor, state.get(f"{layer}.{lengths}"), role, int(layer), layers)
        try:
            made = codec.encode(tensor.reshape(-1, rows.head_dim).cpu(), rows)
        except CacheError:
            tensors[key] = tensor
            continue
        tensors |= {f"{key}:{short}": part for short, part in made.items()}
        coded[key] = {
            "codec": name,
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "lengths": list(rows.lengths),
            "depth": rows.depth,
        }
    return tensors, coded


def decode_state(
    tensors: Mapping[str, Tensor], coded: Mapping[str, Any], max_bytes: int
) -> dict[str, Tensor]:
    """Decode a cache state.

    Args:
        max_bytes: limit of the decoded state; a larger one is not decoded.

    Raises:
        Damaged: codes and metadata do not match.
    """
    state = {key: tensor for key, tensor in tensors.items() if ":" not in key}
    room = max_bytes - sum(tensor.nbytes for tensor in state.values())
    if room < 0:
        raise Damaged("A part of the saved cache exceeds the recorded size of the cache.")
    stacked = dict[str, Any]()
    for key, how in coded.items():
        try:
            part = key.partition(".")[2]
            room -= math.prod(how["shape"]) * DTYPES[how["dtype"]].itemsize
            if room < 0:
                raise Damaged(
                    f"{key} claims the shape {how['shape']}, which is not what was saved."
                )
            if "stack" in how:
                stacked[key] = how
                continue
            state[key] = _decode_tensor(key, _ENCODED_TENSORS[part][0], tensors, how)
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise Damaged(f"{key} of a saved cache cannot be decoded ({error}).") from error
    return state | decode_stacks(tensors, stacked)


def _decode_tensor(
    key: str, role: TensorRole, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> Tensor:
    shape, lengths = tuple(meta["shape"]), tuple(meta["lengths"])
    rows = RowLayout(lengths, shape[-1], float(meta["depth"]), role)
    if sum(lengths) != math.prod(shape[:-1]) or min(lengths, default=0) < 0:
        raise Damaged(f"{key} of the shape {shape} cannot have heads of {lengths} entries.")
    own = {
        name.removeprefix(f"{key}:"): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{key}:")
    }
    numbers = codec_named(meta["codec"]).decode(own, rows)
    return numbers.to(DTYPES[meta["dtype"]]).reshape(shape)


def _row_layout(
    tensor: Tensor, lengths: Tensor | None, role: TensorRole, layer: int, layers: int
) -> RowLayout:
    """Row layout of a tensor; a dense layer (three dimensions) has equal lengths in every head."""
    if tensor.ndim == 3:
        counts: list[int] = [tensor.shape[1]] * tensor.shape[0]
    else:
        counts = [len(tensor)] if lengths is None else lengths.tolist()
    return RowLayout(tuple(counts), tensor.shape[-1], layer / max(layers, 1), role)


def state_nbytes(state: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors, without allocation slack."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in state.values())


def layer_in_name(name: str) -> int:
    """Layer index of a state tensor; -1 if it belongs to none."""
    head = name.partition(".")[0]
    return int(head) if head.isdecimal() else -1


def is_lossless_cache(cache: SequenceCache) -> bool:
    """True if every layer holds every token it has read, uncompressed.

    Only then is the first part of the cache the cache of the first part of the text: what a policy
    keeps depends on the whole text.
    """
    plain = cache.cache_spec.form == "dense" and not cache.plans
    is_partial = cache.spec.recurrent or len(cache.spec.managed) < len(cache.spec.layers)
    lengths = {length for layer in cache.lengths() for length in layer}
    return plain and not is_partial and lengths <= {cache.next_position}


def slice_chunk(state: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Keys and values at true positions [start, stop) of a lossless cache."""
    named = {"keys": "k", "values": "v"}
    return {
        f"L{layer_in_name(name)}.{named[what]}": tensor[:, start:stop].contiguous()
        for name, tensor in state.items()
        if (what := name.partition(".")[2]) in named
    }


def slice_rest(state: Mapping[str, Tensor], start: int) -> dict[str, Tensor]:
    """State of a lossless cache from position `start` on, and everything not sliced by position."""
    return {
        name: tensor
        if name == TAIL
        else tensor[..., start:, :].contiguous()
        if not name.endswith("positions")
        else tensor[start:]
        for name, tensor in state.items()
    }


def join_chunks(
    chunks: Sequence[Mapping[str, Tensor]],
    unchunked: Mapping[str, Tensor],
    spec: ModelSpec,
    length: int,
) -> dict[str, Tensor]:
    """State of a lossless cache of `length` tokens, joined from chunks and the rest.

    Raises:
        Damaged: parts are missing, or of other shapes than the model's.
    """
    state = {TAIL: unchunked[TAIL]} if TAIL in unchunked else {}
    for layer in spec.layers:
        sides = (("keys", "k"), ("values", "v"))
        for what, short in sides[:1] if layer.latent_rank else sides:
            parts = [chunk.get(f"L{layer.index}.{short}") for chunk in chunks]
            parts += [unchunked[name]] if (name := f"{layer.index}.{what}") in unchunked else []
            whole = _concatenate(parts, what)[:, :length]
            if whole.shape != (layer.kv_heads, length, layer.head_dim):
                raise Damaged(
                    f"The chunks of layer {layer.index} make {what} of {tuple(whole.shape)}, but "
                    f"the model's are {(layer.kv_heads, length, layer.head_dim)}."
                )
            state[f"{layer.index}.{what}"] = whole.contiguous()
        state[f"{layer.index}.positions"] = torch.arange(length, dtype=torch.int32)
    return state


def split_layers(state: Mapping[str, Tensor], codec: StorageCodec) -> Iterator[dict[str, Tensor]]:
    """Split a state into parts of whole layers; an unchanged layer yields the same part.

    A codec that codes layers jointly gets one part.
    """
    part: dict[str, Tensor] = {}
    limit = math.inf if codec.spans_layers else SNAPSHOT_PART_BYTES
    for layer in sorted({layer_in_name(name) for name in state}):
        own = {name: tensor for name, tensor in state.items() if layer_in_name(name) == layer}
        if part and state_nbytes(part) + state_nbytes(own) > limit:
            yield part
            part = {}
        part |= own
    if part:
        yield part


def check_fits(state: Mapping[str, Tensor], spec: ModelSpec) -> None:
    """Check that keys and values have the model's sizes and dtype.

    Raises:
        Damaged: they are of another size or type.
    """
    for layer in spec.layers:
        for what in ("keys", "values"):
            tensor = state.get(f"{layer.index}.{what}")
            if tensor is None:
                continue
            if tensor.shape[-1] != layer.head_dim or tensor.dtype is not spec.dtype:
                raise Damaged(
                    f"Layer {layer.index} of the saved cache has {what} of {tensor.shape[-1]} "
                    f"channels in {tensor.dtype}, the model {layer.head_dim} in {spec.dtype}."
                )


def _concatenate(parts: Sequence[Tensor | None], name: str) -> Tensor:
    found = [part for part in parts if part is not None]
    shapes = {(part.ndim, part.shape[0], part.shape[-1]) for part in found}
    if len(found) < len(parts) or len(shapes) != 1 or found[0].ndim != 3:
        raise Damaged(f"Parts of the saved {name} are missing or of different shapes.")
    return torch.cat(found, 1)


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
