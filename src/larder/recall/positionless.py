"""Index by products without positions, in spans around what most heads vote for (LongCache).

Liu et al., "ReAttention: Training-Free Infinite Context with Finite Attention Scope" (2024),
arXiv:2407.15176, released as LongCache: queries and keys are multiplied as they were before
rotation, so that a distance which the model was not trained on moves no score. The `best` entries
of every query head are its votes; the positions with most votes, for all heads of a layer together,
are widened to spans, and these are attended to. What is attended to then stands at positions
without gaps, first tokens before spans before latest tokens: that is the storage `compact()` behind
`park()`, and the preset `longcache` has both.

The released code lets a block of 512 queries vote together; here their mean does
(`prefill="recalled"`), and a generated token by itself. Of positions with equally many votes the
one with the largest product of any head comes first. Where the spans of all positions voted for
leave room, others follow by their largest products (inferred: there, `clip` bounds the number and
nothing fills it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.arguments import require_at_least
from larder.core.observation import Entries
from larder.core.recall import PrefillRecall, RecallResult
from larder.core.spec import LayerSpec
from larder.ops.search import top_rows
from larder.recall._index_base import EntryRecall, group_queries, grow_table, mask_missing
from larder.recall._unrotated_keys import UnrotatedIndex, check_rotation


@dataclass(frozen=True)
class Positionless(EntryRecall):
    """Spans around the positions that most query heads vote for.

    Args:
        best: entries that every query head votes for.
        span: positions of a span, half of them before the one voted for.
        prefill: entries that blocks of a text and questions attend to: `exact`, everything, or
            `recalled`, as many as a decode step.
    """

    best: int = 4
    span: int = 32
    prefill: PrefillRecall = PrefillRecall.EXACT

    follows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, "positionless", best=self.best, span=self.span)

    def index(self, layer: LayerSpec) -> PositionlessIndex:
        """
        Raises:
            CacheError: the rotary embedding of the layer is unknown.
        """
        check_rotation(layer, "positionless")
        return PositionlessIndex(layer, self)


class PositionlessIndex(UnrotatedIndex):
    """Index with every key before rotation, in the dtype of the keys."""

    tables: ClassVar = {"last": None, "keys": 1}

    def __init__(self, layer: LayerSpec, part: Positionless) -> None:
        super().__init__(layer)
        self._part = part
        self._keys = torch.zeros(layer.kv_heads, 0, layer.head_dim)

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        if not max(indexed):
            self._keys = self._keys.to(entries.keys.dtype)
        self._keys = grow_table(self._keys, max(entries.lengths))
        for head, (before, now) in enumerate(zip(indexed, entries.lengths, strict=True)):
            keys = self.unrotated_keys(head, entries, before)
            self._keys[head, before:now] = keys.to(self._keys.dtype)
        self._note_latest(entries)

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        indexed = self.paged.indexed
        grouped = group_queries(self.unrotated_queries(queries), self.layer)
        products = grouped @ self._keys[:, : max(indexed)].float().mT
        return self._spans(mask_missing(products.flatten(0, 1), indexed), entries, count)

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        """Spans by the products of rotated queries and keys."""
        return self._spans(self.logits(queries, entries), entries, count)

    def _spans(self, products: Float[Tensor, "H M"], entries: Entries, count: int) -> RecallResult:
        """Entries of the best spans, at most `count` per kv head."""
        indexed = self.paged.indexed
        if not products.shape[1]:
            return RecallResult(torch.empty(len(indexed), 0, dtype=torch.int64))
        positions = [entries.head_positions(h)[:n].long() for h, n in enumerate(indexed)]
        size = max(int(each.max()) + 1 for each in positions if len(each))
        votes, best = torch.zeros(size), torch.full((size,), -torch.inf)
        for row, chosen in enumerate(top_rows(products, self._part.best)):
            own = positions[row // self.layer.group]
            votes.index_add_(0, own[chosen[chosen >= 0]], torch.ones(int((chosen >= 0).sum())))
            best.scatter_reduce_(0, own, products[row, : len(own)], "amax")
        ranks = self._ranks(votes, best, [own.unique() for own in positions], count)
        scores = torch.full((len(indexed), products.shape[1]), -torch.inf)
        for head, own in enumerate(positions):
            scores[head, : len(own)] = -ranks[own].float()
        return RecallResult(top_rows(scores, count))

    def _ranks(
        self,
        votes: Float[Tensor, " P"],
        best: Float[Tensor, " P"],
        positions: list[Int64[Tensor, " S"]],
        count: int,
    ) -> Int64[Tensor, " P"]:
        """Rank of every position, the first of the best span first, until heads are full."""
        size, before = len(votes), self._part.span // 2
        order = torch.argsort(best, descending=True, stable=True)
        order = order[torch.argsort(votes[order], descending=True, stable=True)]
        ranks, given = torch.full((size,), size), 0
        for center in order[best[order] > -torch.inf].tolist():
            first = max(center - before, 0)
            span = torch.arange(first, min(center - before + self._part.span, size))
            fresh = span[ranks[span] == size]
            ranks[fresh] = given + torch.arange(len(fresh))
            given += len(fresh)
            if len(fresh) and all(
                int((ranks[own] < size).sum()) >= min(count, len(own)) for own in positions
            ):
                break
        return ranks


Part = Positionless
