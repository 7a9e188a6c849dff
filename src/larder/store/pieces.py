"""A cache in pieces: chunks of tokens that sessions may share, and what is one session's alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from larder.cache.latest_activations import TAIL
from larder.cache.sequence import CacheForm, SequenceCache
from larder.core.errors import Damaged
from larder.core.spec import ModelSpec
from larder.store.blobs.cache_state import layer_in_name, state_nbytes

SNAPSHOT_PART_BYTES = 32 * 2**20  # of a snapshot's blob, unless a single layer has more


def is_lossless_cache(cache: SequenceCache) -> bool:
    """Whether everything that was read is held as it was made, in every layer.

    Only of such a cache a beginning is the cache of the beginning: what a policy keeps of a text
    depends on how it goes on.
    """
    plain = cache.makeup.form is CacheForm.DENSE and not cache.plans
    windows = any(layer.sliding_window is not None for layer in cache.spec.layers)
    lengths = {length for layer in cache.lengths() for length in layer}
    return plain and not windows and lengths <= {cache.next_position}


def slice_chunk(state: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Keys and values of true positions [start, stop) of a whole cache."""
    named = {"keys": "k", "values": "v"}
    return {
        f"L{layer_in_name(name)}.{named[what]}": tensor[:, start:stop].contiguous()
        for name, tensor in state.items()
        if (what := name.partition(".")[2]) in named
    }


def slice_rest(state: Mapping[str, Tensor], start: int) -> dict[str, Tensor]:
    """What a whole cache has behind its chunks."""
    return {
        name: tensor
        if name == TAIL
        else tensor[..., start:, :].contiguous()
        if not name.endswith("positions")
        else tensor[start:]
        for name, tensor in state.items()
    }


def join_chunks(
    chunks: Sequence[Mapping[str, Tensor]], rest: Mapping[str, Tensor], spec: ModelSpec, length: int
) -> dict[str, Tensor]:
    """The state of a whole cache of `length` tokens: chunks, then what is behind them.

    Raises:
        Damaged: pieces are missing, or of other shapes than the model's.
    """
    state = {TAIL: rest[TAIL]} if TAIL in rest else {}
    for layer in spec.layers:
        for what, short in (("keys", "k"), ("values", "v")):
            parts = [chunk.get(f"L{layer.index}.{short}") for chunk in chunks]
            parts += [rest[name]] if (name := f"{layer.index}.{what}") in rest else []
            whole = _concatenate(parts, what)[:, :length]
            if whole.shape != (layer.kv_heads, length, layer.head_dim):
                raise Damaged(
                    f"The pieces of layer {layer.index} make {what} of {tuple(whole.shape)}, but "
                    f"the model's are {(layer.kv_heads, length, layer.head_dim)}."
                )
            state[f"{layer.index}.{what}"] = whole.contiguous()
        state[f"{layer.index}.positions"] = torch.arange(length, dtype=torch.int32)
    return state


def split_layers(state: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """A state in parts of whole layers; a layer that did not change makes the same part again."""
    part: dict[str, Tensor] = {}
    for layer in sorted({layer_in_name(name) for name in state}):
        own = {name: tensor for name, tensor in state.items() if layer_in_name(name) == layer}
        if part and state_nbytes(part) + state_nbytes(own) > SNAPSHOT_PART_BYTES:
            yield part
            part = {}
        part |= own
    if part:
        yield part


def check_fits(state: Mapping[str, Tensor], spec: ModelSpec) -> None:
    """See that keys and values are such as the model makes.

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


def _concatenate(parts: Sequence[Tensor | None], what: str) -> Tensor:
    found = [part for part in parts if part is not None]
    shapes = {(part.ndim, part.shape[0], part.shape[-1]) for part in found}
    if len(found) < len(parts) or len(shapes) != 1 or found[0].ndim != 3:
        raise Damaged(f"Pieces of the saved {what} are missing or of different shapes.")
    return torch.cat(found, 1)
