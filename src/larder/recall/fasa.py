"""FASA index: entries by products over the few rotary dimension pairs that predict a ranking.

Wang et al., "FASA: Frequency-aware Sparse Attention" (2026), arXiv:2602.03152: RoPE splits
the product of query and key into a sum over pairs of dimensions, one per frequency. A pair's
contextual agreement is the share of the best entries by the full product that are also among the
best by the pair alone; the pairs of the highest mean agreement represent the head, and the sum over
them ranks all entries.

Sixteen pairs, a quarter of a head of 128, and agreement over the best 256 entries are among the
settings of the paper's ablation, according to a published note on it; it has 8 and 12 as well.

Differences: the paper calibrates once per model, offline; here pairs are selected per kv head, by
all its query heads together, over the latest queries of the text that is read. Without queries the
pairs with the largest keys are taken, until there are some. Dimensions that are not rotated are
paired like the others. Every query head ranks for itself; the paper leaves groups open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
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
)


@dataclass(frozen=True)
class Fasa(EntryRecall):
    """Entries by products over the dominant pairs of dimensions.

    Args:
        pairs: dimension pairs that represent a head.
        agreeing: number of best entries that agreement is measured on.
    """

    pairs: int = 16
    agreeing: int = 256

    observed: ClassVar[int] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.pairs >= 1, "fasa.pairs", "at least 1", self.pairs)
        require(self.agreeing >= 1, "fasa.agreeing", "at least 1 entry", self.agreeing)

    def index(self, layer: LayerSpec) -> FasaIndex:
        return FasaIndex(layer, self)


class FasaIndex(EntryIndex):
    """Index with the selected dimensions of all keys, channel by channel, in the keys' dtype."""

    tables = {"chosen": None, "asked": None, "keys": 2}

    def __init__(self, layer: LayerSpec, part: Fasa) -> None:
        super().__init__(layer)
        self._agreeing = part.agreeing
        self._pairs = rotary_pairs(layer)  # [F, 2]
        chosen = 2 * min(part.pairs, len(self._pairs))
        self._chosen = torch.zeros(layer.kv_heads, chosen, dtype=torch.int64)
        self._asked = torch.zeros(layer.kv_heads, dtype=torch.bool)  # who was chosen by queries
        self._keys = torch.zeros(layer.kv_heads, chosen, 0)

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        self._keys = grow_table(self._keys.to(entries.keys.dtype), max(entries.lengths), dim=2)
        for head, (before, now) in enumerate(zip(indexed, entries.lengths, strict=True)):
            first = before
            if now and not self._asked[head] and (queries is not None or not before):
                self._choose(head, entries.head_keys(head).float(), queries)
                first = 0
            fresh = entries.keys_from(head, first)
            self._keys[head, :, first:now] = fresh[:, self._chosen[head]].T

    def _choose(
        self, head: int, keys: Float[Tensor, "S D"], queries: Float[Tensor, "H Q D"] | None
    ) -> None:
        if queries is None:
            merits = keys[:, self._pairs].square().sum((0, 2))
        else:
            group = self.layer.group
            asked = queries[head * group : (head + 1) * group].float().flatten(0, 1)
            merits = contextual_agreement(asked, keys, self._pairs, self._agreeing)
            self._asked[head] = True
        best = top_rows(merits[None], self._chosen.shape[1] // 2)[0]
        self._chosen[head] = self._pairs[best].flatten()

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        heads, group, indexed = self.layer.kv_heads, self.layer.group, self.paged.indexed
        picks = self._chosen[:, None].expand(-1, group, -1)
        grouped = group_queries(queries, self.layer).gather(2, picks)
        columns = torch.arange(picks.shape[2]).expand(heads, group, -1)
        scores = channel_products(self._keys, columns, grouped, max(indexed))
        return RecallResult(top_rows(mask_missing(scores.flatten(0, 1), indexed), count))

    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors(), self._pairs)


def rotary_pairs(layer: LayerSpec) -> Int64[Tensor, "F 2"]:
    """Dimensions that are rotated together, then neighbors among those that are not rotated."""
    rotated = len(layer.radians) if layer.radians else 0
    first = torch.arange(rotated)
    rest = torch.arange(2 * rotated, layer.head_dim)
    half = len(rest) // 2
    rest = torch.stack([rest[:half], rest[half : 2 * half]], dim=1)
    return torch.cat([torch.stack([first, first + rotated], dim=1), rest])


def contextual_agreement(
    queries: Float[Tensor, "Q D"],
    keys: Float[Tensor, "S D"],
    pairs: Int64[Tensor, "F 2"],
    agreeing: int,
) -> Float[Tensor, " F"]:
    """Mean share of best entries that each pair has in common with the full product."""
    full = top_mask(queries @ keys.T, agreeing)
    merits: list[Tensor] = []
    for pair in pairs:
        alone = top_mask(queries[:, pair] @ keys[:, pair].T, agreeing)
        most = torch.maximum(full.sum(1), alone.sum(1))  # a pair with equal products marks all
        merits.append(((full & alone).sum(1) / most).mean())
    return torch.stack(merits)


def top_mask(scores: Float[Tensor, "Q S"], count: int) -> Bool[Tensor, "Q S"]:
    """Mask of the scores that are no worse than the `count`-th best of their row."""
    least = torch.topk(scores, min(count, scores.shape[1])).values[:, -1:]
    return scores >= least


Part = Fasa
