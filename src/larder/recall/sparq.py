"""SparQ index: entries by the few channels in which the query is largest.

Ribar et al., "SparQ Attention: Bandwidth-Efficient LLM Inference" (2023), arXiv:2312.04985,
algorithm 1: the channels of the largest absolute numbers, summed over a group, are read
of every key; their products, at a temperature for the omitted channels, approximate attention;
the highest entries by its sum over the group are attended to exactly; the missing mass
goes to the mean value of all.

Differences: shares and the mean are over offloaded entries alone, since the device tier is
attended to exactly. As in the paper, keys are stored a second time, channel by channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import Entries
from larder.core.recall import RecallResult
from larder.core.spec import LayerSpec
from larder.ops.approximate_products import channel_products
from larder.ops.search import top_rows
from larder.recall._index_base import (
    EntryIndex,
    EntryRecall,
    group_queries,
    grow_table,
    mask_missing,
    softmax_weights,
    sum_group_weights,
)

MIN_SHARE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class SparQ(EntryRecall):
    """Entries by attention over few channels, and the mean value for the rest.

    Args:
        channels: channels read of every key.
    """

    channels: int = 32

    is_plain: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.channels >= 1, "sparq.channels", "at least 1", self.channels)

    def index(self, layer: LayerSpec) -> SparQIndex:
        return SparQIndex(layer, self.channels)


class SparQIndex(EntryIndex):
    """Index with a second copy of all keys, in their dtype, and float64 sums of the values."""

    tables = {"keys": 2, "sums": None}

    def __init__(self, layer: LayerSpec, channels: int) -> None:
        super().__init__(layer)
        self._read = min(channels, layer.head_dim)
        self._keys = torch.zeros(layer.kv_heads, layer.head_dim, 0)
        self._sums = torch.zeros(layer.kv_heads, layer.head_dim, dtype=torch.float64)

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        self._keys = grow_table(self._keys.to(entries.keys.dtype), max(entries.lengths), dim=2)
        for head, (before, now) in enumerate(zip(indexed, entries.lengths, strict=True)):
            self._keys[head, :, before:now] = entries.keys_from(head, before).T
            self._sums[head] += entries.values_from(head, before).double().sum(0)

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        grouped = group_queries(queries, self.layer)
        picks = top_rows(grouped.abs().sum(1), self._read)  # [K, N]
        picks = picks[:, None].expand(-1, self.layer.group, -1)
        read = grouped.gather(2, picks)
        left = read.abs().sum(2) / grouped.abs().sum(2).clamp(min=MIN_SHARE)
        indexed = self.paged.indexed
        logits = channel_products(self._keys, picks, read, max(indexed))
        logits *= self.layer.scaling / left.clamp(min=1e-12).sqrt()[..., None]
        return self._result(mask_missing(logits.flatten(0, 1), indexed), count)

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        return self._result(self.logits(queries, entries), count)

    def _result(self, logits: Float[Tensor, "H M"], count: int) -> RecallResult:
        weights, indexed = softmax_weights(logits), self.paged.indexed
        pages = top_rows(sum_group_weights(weights, indexed), count)
        each = pages.repeat_interleave(self.layer.group, 0)
        share = weights.gather(1, each.clamp(min=0)).masked_fill(each < 0, 0.0).sum(1)
        owned = torch.tensor(indexed)
        share[(owned == 0).repeat_interleave(self.layer.group)] = 1.0  # there is nothing to mix in
        mean = (self._sums / owned.clamp(min=1)[:, None]).float()
        # A group's selection may have no weight for one of its heads. The share is never 0, since
        # the mean's weight is computed from that of the fetched entries.
        return RecallResult(pages, share=share.clamp(MIN_SHARE, 1.0), mean=mean)


Part = SparQ
