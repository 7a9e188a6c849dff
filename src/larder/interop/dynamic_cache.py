"""Exchange of cached entries with the DynamicCache of transformers.

A DynamicCache has one length per layer, the same for all heads and rows, and one attention mask for
all layers of a kind: measured on transformers 5.23, layers of different lengths answer calls of one
token under sdpa, and fail in every other call. So only caches of one length are exported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from larder.cache.sequence import SequenceCache
from larder.core.errors import CacheError
from larder.core.part import LOG_COUNT, Ledger
from larder.core.spec import LayerSpec, ModelSpec

FORMS = ("dense", "ragged")  # cache forms whose entries are keys and values at true positions
ONE_ROW = "one = cache.fork(); one.batch_select_indices(torch.tensor([0]))"


class EvictedLayer(DynamicLayer):
    """Layer of a DynamicCache from which entries were evicted; its length counts their tokens.

    New tokens so get their true positions, `generate` continues a text behind the tokens that were
    read, and a mask has one column per held entry, as in a sliding-window layer.

    Args:
        num_evicted: number of tokens whose entries are not held.
        positions: true positions of the entries held at first; later ones follow the length.
    """

    def __init__(self, num_evicted: int, positions: Int[Tensor, "B K S"]) -> None:
        super().__init__()
        self.num_evicted, self.positions = num_evicted, positions
        self.siblings = [self]  # such layers of the same cache

    def get_seq_length(self) -> int:
        """Tokens that were read."""
        return super().get_seq_length() + self.num_evicted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of a mask, and the token of the first of them."""
        return super().get_seq_length() + query_length, self.num_evicted

    def reset(self) -> None:
        """Empty the layer."""
        super().reset()
        self.num_evicted, self.positions = 0, self.positions[:, :, :0]

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take rows in a new order."""
        super().reorder_cache(beam_idx)
        self.positions = self.positions[beam_idx.to(self.positions.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        super().batch_repeat_interleave(repeats)
        self.positions = self.positions.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take some of the rows."""
        super().batch_select_indices(indices)
        self.positions = self.positions[indices.to(self.positions.device)]

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens.

        Raises:
            CacheError: a head of any layer does not hold the entries of all of them; no layer is
                cropped then.
        """
        length = self.get_seq_length()
        for layer in self.siblings:
            if layer.get_seq_length() == length:  # not cropped yet
                layer.check_crop(tokens_to_remove)
        held = super().get_seq_length() + tokens_to_remove
        super().crop(tokens_to_remove)
        self.positions = self.positions[:, :, : max(0, held)]

    def check_crop(self, tokens_to_remove: int) -> None:
        """Check that every head holds the entries of the last `-tokens_to_remove` tokens.

        Raises:
            CacheError: one does not.
        """
        first, held = self.positions.shape[-1], super().get_seq_length() + tokens_to_remove
        cropped = self.positions[:, :, max(0, held) :]
        last = torch.arange(first - cropped.shape[-1], first, device=cropped.device)
        if not torch.equal(cropped, (last + self.num_evicted).expand_as(cropped).to(cropped)):
            raise CacheError(
                f"{-tokens_to_remove} tokens cannot be cropped from the DynamicCache, because "
                "entries of them were evicted before the export: crop fewer, or export a fork() "
                "of the cache from before them."
            )

    def true_positions(self) -> Int[Tensor, "B K S"]:
        """True positions of all entries."""
        first, held = self.positions.shape[-1], super().get_seq_length()
        later = torch.arange(first, held, device=self.positions.device) + self.num_evicted
        return torch.cat([self.positions, later.expand(*self.positions.shape[:2], -1)], -1)


def dynamic_cache_of(sequences: Sequence[SequenceCache], config: Any) -> DynamicCache:
    """DynamicCache with copies of the entries of sequences, one row each.

    Args:
        sequences: caches of one model, with the same number of tokens read.
        config: configuration of the model.

    Raises:
        CacheError: a DynamicCache cannot hold the entries: lengths differ between heads, layers or
            rows, or entries are more than keys and values at true positions.
    """
    if not sequences:
        raise CacheError("The cache is empty, so that nothing can be exported: read a text first.")
    _check_lengths(sequences)
    for sequence in sequences:
        _check_entries(sequence)
    exported = DynamicCache(config=config)
    spec = sequences[0].spec
    if spec.recurrent or len(exported.layers) != len(spec.layers):
        raise CacheError(
            f"transformers caches {len(exported.layers)} layers of this model, but attention has "
            f"{len(spec.layers)}, and {len(spec.recurrent)} tensors are of recurrent layers: "
            "continue with the LarderCache."
        )
    for layer in spec.holders:
        exported.layers[layer.index] = _exported_layer(
            exported.layers[layer.index], sequences, layer
        )
    evicted = [layer for layer in exported.layers if isinstance(layer, EvictedLayer)]
    for layer in evicted:
        layer.siblings = evicted
    return exported


def _check_lengths(sequences: Sequence[SequenceCache]) -> None:
    """Check that rows have read equally many tokens, and that all heads hold equally many entries.

    Raises:
        CacheError: they do not.
    """
    read = [sequence.next_position for sequence in sequences]
    if len(set(read)) > 1:
        raise CacheError(
            f"The rows have read texts of {', '.join(map(str, read))} tokens, but a DynamicCache "
            f"has one length: export row by row ({ONE_ROW})."
        )
    by_layer = [each.lengths()[layer.index] for each in sequences for layer in each.spec.managed]
    lengths = {length for heads in by_layer for length in heads}
    if len(lengths) > 1:
        raise CacheError(
            f"Heads and layers hold between {min(lengths)} and {max(lengths)} entries, but a "
            "DynamicCache holds one number, and padding would be attended to: take a policy with "
            "equal lengths, such as snapkv, streaming_llm or another with uniform()."
        )


def _check_entries(sequence: SequenceCache) -> None:
    """Check that all entries of a cache are keys and values at true positions."""
    spec = sequence.cache_spec
    kinds = {
        "quantized entries": spec.codecs,
        "entries in host memory": spec.parking,
        "entries that are computed again": spec.rebuilding,
        f"entries in the form {spec.form}": spec.form not in FORMS,
    }
    for kind, is_used in kinds.items():
        if is_used:
            raise CacheError(
                f"The policy holds {kind}, which a DynamicCache cannot: take a policy whose "
                "entries are keys and values, such as snapkv."
            )
    for layer in sequence.spec.managed:
        counts = sequence.entries(layer.index).columns.get(LOG_COUNT)
        if counts is not None and bool(counts.any()):
            raise CacheError(
                "Merged entries weigh as much as the tokens that they stand for, which a "
                "DynamicCache cannot express: take a policy that drops entries, with drop()."
            )


def _exported_layer(
    target: Any, sequences: Sequence[SequenceCache], layer: LayerSpec
) -> DynamicLayer:
    """Layer of transformers with copies of the entries.

    Args:
        target: empty layer that transformers takes for the model.
    """
    parts = [_entries(sequence, layer) for sequence in sequences]
    keys, values, positions = (torch.stack(side) for side in zip(*parts, strict=True))
    length = sequences[0].next_position
    if layer.sliding_window is not None:
        if type(target) is not DynamicSlidingWindowLayer or layer.chunk is not None:
            raise _unknown_layer(target, layer)
        least = max(0, keys.shape[2] - target.sliding_window + 1)
        target.update(keys[:, :, least:], values[:, :, least:])
        target.cumulative_length = length
        return target
    if type(target) is not DynamicLayer:
        raise _unknown_layer(target, layer)
    exported = EvictedLayer(length - keys.shape[2], positions)
    exported.update(keys, values)
    return exported


def _entries(
    sequence: SequenceCache, layer: LayerSpec
) -> tuple[Float[Tensor, "K S _"], Float[Tensor, "K S _"], Int[Tensor, "K S"]]:
    """Keys, values and true positions of a layer whose heads hold equally many entries.

    Of latents (MLA), transformers holds the values in place of the keys, and the rest of the keys
    in place of the values.
    """
    held, heads = sequence.entries(layer.index), layer.kv_heads
    keys, values = held.pack(held.keys), held.pack(held.values)
    if layer.latent_rank:
        keys, values = values, keys[:, layer.latent_rank :]
    return (
        keys.view(heads, -1, keys.shape[-1]),
        values.view(heads, -1, values.shape[-1]),
        held.packed_positions().view(heads, -1),
    )


def _unknown_layer(found: Any, layer: LayerSpec) -> CacheError:
    return CacheError(
        f"Layer {layer.index} is a {type(found).__name__} in transformers, which is not exchanged: "
        "continue with the cache that you have."
    )


def filled_cache(empty: SequenceCache, cache: Cache, row: int, length: int) -> SequenceCache:
    """Cache with copies of the entries of a row of a DynamicCache.

    Args:
        empty: empty cache in the form of the policy; its entries are those of the result.
        length: number of tokens read.

    Raises:
        CacheError: the entries do not fit the model or the form.
    """
    spec, form = empty.spec, empty.cache_spec
    if form.form not in FORMS or form.ledger != Ledger() or form.codecs:
        raise CacheError(
            "The policy keeps more of an entry than key, value and position, which a DynamicCache "
            "does not have: take a policy without statistics over steps, merging, quantization or "
            "recall, such as snapkv."
        )
    state = dict[str, Tensor]()
    for layer in spec.holders:
        state_of_layer = _layer_state(cache.layers[layer.index], row, length, spec, layer)
        if layer.sliding_window is None:
            state_of_layer = _managed_state(state_of_layer, form.form, layer)
        state |= {
            f"{layer.index}.{name}": tensor.clone() for name, tensor in state_of_layer.items()
        }
    return SequenceCache.adopt(spec, state, {**empty.meta(), "next_position": str(length)})


def check_dynamic_cache(cache: Cache, spec: ModelSpec) -> tuple[int, int]:
    """Rows of a DynamicCache, and tokens that it has read.

    Raises:
        CacheError: it is another kind of cache, empty, or of another model.
    """
    if not isinstance(cache, DynamicCache) or cache.offloading:
        raise CacheError(
            f"A {type(cache).__name__} cannot be taken over: give a transformers.DynamicCache that "
            "is not offloaded."
        )
    if spec.recurrent or len(cache.layers) != len(spec.layers):
        raise CacheError(
            f"The DynamicCache has {len(cache.layers)} layers, but the model has "
            f"{len(spec.layers)} with attention and {len(spec.recurrent)} tensors of recurrent "
            "layers: give a cache that this model, without recurrent layers, has filled."
        )
    layers: list[Any] = [cache.layers[layer.index] for layer in spec.holders]
    for layer, found_layer in zip(spec.holders, layers, strict=True):
        if not isinstance(found_layer, DynamicLayer):
            raise _unknown_layer(found_layer, layer)
    lengths = {each.get_seq_length() for each in layers}
    if len(lengths) > 1 or 0 in lengths:
        found = ", ".join(map(str, sorted(lengths)))
        raise CacheError(
            f"The layers of the DynamicCache have read {found} tokens, but must have read one "
            "number, at least 1: give a cache that whole calls of the model have filled."
        )
    return layers[0].keys.shape[0], lengths.pop()


def _layer_state(
    source: Any, row: int, length: int, spec: ModelSpec, layer: LayerSpec
) -> dict[str, Tensor]:
    """Keys, values [K, S, D] and true positions [K, S] of a row of a layer."""
    keys, values = source.keys[row], source.values[row]
    if layer.latent_rank and keys.shape[2] == layer.latent_rank:
        keys = values = torch.cat([keys, values], dim=2)
    expected, found = (layer.kv_heads, layer.head_dim), (keys.shape[0], keys.shape[2])
    if found != expected or values.shape != keys.shape or keys.dtype != spec.dtype:
        raise CacheError(
            f"Layer {layer.index} of the DynamicCache has {found[0]} heads of {found[1]} numbers "
            f"in {source.keys.dtype}, but the model has {expected[0]} of {expected[1]} in "
            f"{spec.dtype}: give a cache that this model has filled."
        )
    if layer.sliding_window is not None:
        positions = torch.arange(length - keys.shape[1], length)
    elif type(source) is EvictedLayer:
        positions = source.true_positions()[row]
    elif type(source) is DynamicLayer:
        positions = torch.arange(keys.shape[1])
    else:
        raise _unknown_layer(source, layer)
    head_positions = positions.to(spec.device, torch.int32).expand(layer.kv_heads, -1)
    if layer.sliding_window is not None:
        head_positions = head_positions[0]
    return {"keys": keys, "values": values, "positions": head_positions}


def _managed_state(state: Mapping[str, Tensor], form: str, layer: LayerSpec) -> dict[str, Tensor]:
    """State of a layer in a cache form, as `CacheLayer.adopt` takes it."""
    keys, values, positions = state["keys"], state["values"], state["positions"]
    if form == "ragged":
        lengths = torch.full((layer.kv_heads,), keys.shape[1])
        return {
            "keys": keys.flatten(0, 1),
            "values": values.flatten(0, 1),
            "positions": positions.flatten(),
            "lengths": lengths,
        }
    if not torch.equal(positions, positions[:1].expand_as(positions)):
        raise CacheError(
            "The policy keeps everything, so that its heads hold the same positions, but the "
            "heads of the DynamicCache hold different ones: give the policy that it was exported "
            "under."
        )
    return {"keys": keys, "values": values, "positions": positions[0]}
