"""RocketKV second-stage index: pages by a few channels of their largest or smallest keys.

Behnam et al., "RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache
Compression" (2025), arXiv:2502.14051: chunks of keys are summarized by their largest and
smallest numbers; of these, the channels in which a group's query is largest are read, the largest
or the smallest number by the query's sign; softmax at SparQ's temperature, mean over the group, and
the best chunks are attended to exactly. A ratio is split between the two sides: chunks of its root,
rounded up, and correspondingly fewer channels.

Summaries, channels, temperature, mean and the split of the ratio are those of the released code.

Differences: the first stage, which cuts the text once, is a scorer's work, so the ratio is a
parameter and not derived from that stage. A partial last chunk is summarized as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import Entries
from larder.core.recall import RecallPart, RecallResult
from larder.core.spec import LayerSpec
from larder.ops.approximate_products import channel_products
from larder.ops.search import top_rows
from larder.recall._index_base import (
    ContiguousIndex,
    group_queries,
    grow_table,
    mask_missing,
    softmax_weights,
    sum_group_weights,
)
from larder.recall.bounds import PageSummary, changed_boxes


@dataclass(frozen=True)
class Rocket(RecallPart):
    """Chunks of contiguous entries, by attention to the side of their box that a query faces.

    Args:
        ratio: reduction of the numbers read, relative to all keys.
    """

    ratio: float = 16.0

    def __post_init__(self) -> None:
        require(1 <= self.ratio < math.inf, "rocket.ratio", "at least 1", self.ratio)
        super().__post_init__()  # checks the page, which depends on the ratio

    @property
    def page(self) -> int:
        """Entries of a chunk: the root of the ratio, rounded up; 1 where that exceeds the ratio."""
        chunk = math.ceil(math.sqrt(self.ratio))
        return chunk if chunk <= self.ratio else 1

    def index(self, layer: LayerSpec) -> RocketIndex:
        channels = int(layer.head_dim * self.page / self.ratio)
        return RocketIndex(layer, self.page, max(channels, 1))


class RocketIndex(ContiguousIndex):
    """Index with the largest and smallest numbers of each chunk, channel by channel, in float32."""

    tables = {"sides": 2}

    def __init__(self, layer: LayerSpec, page: int, channels: int) -> None:
        super().__init__(layer, page)
        self._read = min(channels, layer.head_dim)
        self._sides = torch.zeros(layer.kv_heads, 2 * layer.head_dim, 0)  # largest, then smallest

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        self._sides = grow_table(self._sides, -(-max(entries.lengths) // self.page), dim=2)
        for head, first, boxes in changed_boxes(entries, indexed, self.page, PageSummary.QUEST):
            self._sides[head, :, first : first + len(boxes)] = boxes.T

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        grouped = group_queries(queries, self.layer)
        picks = top_rows(grouped.abs().sum(1), self._read)[:, None].expand(-1, self.layer.group, -1)
        read = grouped.gather(2, picks)
        left = read.abs().sum(2) / grouped.abs().sum(2).clamp(min=torch.finfo(torch.float32).tiny)
        sides = picks + self.layer.head_dim * (read < 0)
        logits = channel_products(self._sides, sides, read, max(self.counts))
        logits *= self.layer.scaling / left.clamp(min=1e-12).sqrt()[..., None]
        return self._result(mask_missing(logits.flatten(0, 1), self.counts), count)

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        return self._result(self.page_scores(queries, entries).mul_(self.layer.scaling), count)

    def _result(self, logits: Float[Tensor, "H P"], count: int) -> RecallResult:
        return RecallResult(
            top_rows(sum_group_weights(softmax_weights(logits), self.counts), count)
        )


Part = Rocket
