"""Attention to parked entries, and to what stands for those that were not fetched."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.forms.base import AttentionState
from larder.cache.offload.page_pool import MASKED_BIAS
from larder.core.observation import Entries
from larder.core.recall import Estimate
from larder.core.spec import LayerSpec
from larder.core.types import Queries
from larder.ops.attention import ragged_attention
from larder.ops.packing import starts_of, storage_rows

MAX_ROWS = 1 << 14  # of the slow tier, brought to an accelerator at once


def attend_all(queries: Queries, held: Entries, layer: LayerSpec) -> list[AttentionState]:
    """Attention of several queries to all that is parked, piece by piece where it is brought."""
    starts, lengths = held.layout
    if queries.device.type == "cpu":
        layout = starts, lengths, layer.scaling
        return [ragged_attention(queries, held.keys, held.values, *layout)]
    piece = max(1, MAX_ROWS // layer.kv_heads)
    parts: list[AttentionState] = []
    for first in range(0, max(held.lengths), piece):
        counts = (lengths - first).clamp(0, piece)
        rows = storage_rows(torch.arange(int(counts.sum())), starts + first, counts)
        keys, values = (part[rows].to(queries.device) for part in (held.keys, held.values))
        layout = starts_of(counts), counts, layer.scaling
        parts.append(ragged_attention(queries, keys, values, *layout))
    return parts


def attend_estimate(queries: Queries, estimate: Estimate, layer: LayerSpec) -> AttentionState:
    """Attention to what stands for entries that were not fetched."""
    count, place = estimate.keys.shape[1], queries.device
    starts = torch.arange(layer.kv_heads) * count
    flat = [part.float().flatten(0, 1).to(place) for part in (estimate.keys, estimate.values)]
    bias = estimate.log_counts.float().clamp(min=MASKED_BIAS).flatten().contiguous().to(place)
    layout = starts, torch.full_like(starts, count), layer.scaling
    return ragged_attention(queries, flat[0], flat[1], *layout, bias)


def attend_mean(
    fetched: AttentionState,
    share: Float[Tensor, " H"],
    mean: Float[Tensor, "K D"],
    layer: LayerSpec,
) -> AttentionState:
    """What the entries that were not fetched are taken for: their mean, with their share."""
    out, lse = fetched
    left = ((1 - share) / share).log().clamp(min=MASKED_BIAS).to(lse)
    values = mean.to(out).repeat_interleave(layer.group, 0)[:, None]
    return values.expand_as(out), lse + left[:, None]
