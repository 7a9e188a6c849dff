"""Cache states encoded by a codec: keys and values are coded, everything else is copied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from larder.cache.latest_activations import TAIL
from larder.cache.sequence import SequenceCache
from larder.core.errors import CacheError, Damaged
from larder.core.spec import ModelSpec
from larder.store.blobs.container import DTYPE_NAMES, DTYPES
from larder.store.blobs.layer_stacks import decode_stacks, encode_stacks
from larder.store.codecs.base import RowLayout, StorageCodec, TensorRole, codec_named

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
