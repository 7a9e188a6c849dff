"""Indexes that find entries one by one: a page is an entry, its number the entry's.

Rows of scores have a column per entry of the longest head; -inf behind the end of a shorter one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Entries
from larder.core.recall import RecallIndex, RecallPart
from larder.core.spec import LayerSpec
from larder.ops.search import page_max_scores
from larder.recall._coming import indexed_layout
from larder.recall._index_base import ContiguousIndex


class EntryIndex(ContiguousIndex):
    """What they share: a page never changes, and there are as many as entries."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer, 1)

    def logits(self, queries: Float[Tensor, "H D"], entries: Entries) -> Float[Tensor, "H M"]:
        """What attention would take from every entry that the index knows."""
        layout = indexed_layout(entries, self.paged.known)
        return page_max_scores(queries, entries.keys, *layout).mul_(self.layer.scaling)


@dataclass(frozen=True)
class EntryRecall(RecallPart):
    """A part whose index is an `EntryIndex`."""

    @property
    def page(self) -> int:
        return 1

    @abstractmethod
    def index(self, layer: LayerSpec) -> EntryIndex: ...

    def adopt(self, layer: LayerSpec, state: Mapping[str, Tensor]) -> RecallIndex:
        index = self.index(layer)
        index.restore(state)
        return index


def group_queries(queries: Float[Tensor, "H D"], layer: LayerSpec) -> Float[Tensor, "K R D"]:
    """Queries in float32, by the kv head that they belong to."""
    return queries.float().view(layer.kv_heads, layer.group, layer.head_dim)


def mask_missing(scores: Float[Tensor, "N M"], counts: tuple[int, ...]) -> Float[Tensor, "N M"]:
    """-inf where a row reaches behind what its kv head has; in place."""
    if min(counts) < scores.shape[1]:
        owned = torch.tensor(counts).repeat_interleave(len(scores) // len(counts))
        scores.masked_fill_(torch.arange(scores.shape[1]) >= owned[:, None], -torch.inf)
    return scores


def softmax_weights(logits: Float[Tensor, "N M"]) -> Float[Tensor, "N M"]:
    """Softmax of every row; zeros in a row that has nothing."""
    return torch.softmax(logits, dim=1).nan_to_num_(0.0)


def sum_group_weights(
    weights: Float[Tensor, "H M"], counts: tuple[int, ...]
) -> Float[Tensor, "K M"]:
    """Weights summed over the query heads of each kv head, -inf where it has no entry."""
    heads, columns = len(counts), weights.shape[1]
    return mask_missing(weights.view(heads, len(weights) // heads, columns).sum(1), counts)
