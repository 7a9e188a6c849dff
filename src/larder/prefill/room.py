"""How many caches fit beside each other while they are read, on an accelerator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from larder.core.spec import POSITION_BYTES
from larder.prefill.reader import PrefillReader, PrefillSequence

# Of what is free; the rest is for attention's own buffers, which the estimate leaves out.
USABLE_FRACTION = 0.5
# What a pass holds of a token beside its keys and values, in widths of a layer's queries: hidden
# states, float32 queries and outputs, a gated MLP of four times the width. Twice what an 8B needs.
ACTIVATION_WIDTHS = 32


def free_device_bytes(device: torch.device) -> int | None:
    """Memory that new tensors may take; None on a CPU and where the device does not tell."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def max_parallel_caches(
    reader: PrefillReader, lanes: Sequence[PrefillSequence], ids: tuple[int, ...], block: int
) -> int:
    """How many of the lanes to read together: at least one.

    One on a CPU, where reading several at once is no faster and holds more.

    Args:
        ids: the tokens to be read.
        block: of them, the most at a time.
    """
    free = free_device_bytes(reader.decoder.spec.device)
    if free is None:
        return 1
    each = max(
        cache_bytes(reader, lane, ids, block) + activation_bytes(reader, lane, ids[:block])
        for lane in lanes
    )
    return max(1, min(len(lanes), int(free * USABLE_FRACTION) // each))


def cache_bytes(
    reader: PrefillReader, lane: PrefillSequence, ids: tuple[int, ...], block: int
) -> int:
    """The most that a lane's cache takes: budget and block, and one layer laid out anew."""
    spec, longest = reader.decoder.spec, lane.cache.next_position + len(ids)
    layers: list[int] = []
    for layer in spec.layers:
        bound = layer.sliding_window or reader.quotas[layer.index]
        entry = layer.bytes_per_token(spec.dtype) + layer.kv_heads * POSITION_BYTES
        layers.append(min(bound + block, longest) * entry)
    return sum(layers) + max(layers)


def activation_bytes(reader: PrefillReader, lane: PrefillSequence, block: tuple[int, ...]) -> int:
    """The most that a lane's tokens take while they pass through the model."""
    asked = reader.planner.scorer.scratch(block, len(block), lane.book)
    tokens = max(len(block), *(scratch.tokens for scratch in asked), 0)
    spec = reader.decoder.spec
    width = max(layer.query_heads * layer.head_dim for layer in spec.layers)
    return tokens * width * ACTIVATION_WIDTHS * spec.dtype.itemsize
