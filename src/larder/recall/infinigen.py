"""InfiniGen index: entries by products of few skewed channels, as many as come near the largest.

Lee et al., "InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV
Cache Management" (2024), arXiv:2406.19707, section 4: queries and keys are turned by an orthogonal
matrix, which leaves their products as they are and gathers them in few channels; the fifth of the
channels in which queries are largest speculates on the products. Entries within `alpha` of a query
head's largest are counted; the mean count over heads, at most a fifth of all entries, is the number
that every head fetches, one layer ahead (`fetch="ahead"`) by the input of the layer before.

Counts, their mean without its fraction, the fifths and alpha 5 (4 for OPT) are those of the
released code, whose accuracy script compares all heads of Llama with the first head's largest: a
slip, not followed. Differences: the matrix comes from the latest queries of the text when the index
is built, not from another text. It is one per kv head, of the queries of its group, and entries are
ranked by their least distance from the largest product of any query head of it [inferred: the
released models have as many kv heads]. Offloaded entries are never dropped. Where
all entries of a head fit in `tokens`, all are fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.observation import Entries
from larder.core.recall import RecallResult
from larder.core.spec import LayerSpec
from larder.ops.search import top_rows
from larder.recall._index_base import (
    EntryIndex,
    EntryRecall,
    group_queries,
    grow_table,
    mask_missing,
)


@dataclass(frozen=True)
class InfiniGen(EntryRecall):
    """Entries near the largest product of few channels.

    Args:
        channels: share of the channels that are read, in (0, 1].
        alpha: distance of a logit from the largest up to which an entry counts.
        most: largest share of the entries that is fetched, in (0, 1].
    """

    channels: float = 0.2
    alpha: float = 5.0
    most: float = 0.2

    observed: ClassVar[int] = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("channels", "most"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise BadParameter(f"infinigen.{name} must be a share in (0, 1], got {value}.")
        require(self.alpha >= 0, "infinigen.alpha", "0 or more", self.alpha)

    def index(self, layer: LayerSpec) -> InfiniGenIndex:
        return InfiniGenIndex(layer, self)


class InfiniGenIndex(EntryIndex):
    """Index with the skewed channels of every key, in float32, and what turns queries into them."""

    tables: ClassVar = {"skew": None, "keys": 1}

    def __init__(self, layer: LayerSpec, part: InfiniGen) -> None:
        super().__init__(layer)
        self._part = part
        self._read = max(1, int(part.channels * layer.head_dim))
        self._skew = torch.zeros(layer.kv_heads, 0, self._read)  # [K, D, C], made of queries
        self._keys = torch.zeros(layer.kv_heads, 0, self._read)

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        if not self._skew.shape[1]:
            self._skew = self._skew_directions(queries)
        self._keys = grow_table(self._keys, max(entries.lengths))
        for head, (before, now) in enumerate(zip(indexed, entries.lengths, strict=True)):
            keys = entries.keys_from(head, before).float()
            self._keys[head, before:now] = keys @ self._skew[head]

    def _skew_directions(self, queries: Tensor | None) -> Float[Tensor, "K D C"]:
        """Directions of each kv head in which its queries are largest, the largest first.

        The first channels as they are before any query was observed.
        """
        layer = self.layer
        if queries is None or not queries.shape[1]:
            plain = torch.eye(layer.head_dim)[:, : self._read]
            return plain.repeat(layer.kv_heads, 1, 1)
        rows = queries.float().view(layer.kv_heads, -1, layer.head_dim)
        rotated = torch.linalg.svd(rows.double(), full_matrices=True).Vh.transpose(1, 2).float()
        best = top_rows((rows @ rotated).abs().sum(1), self._read)  # [K, C]
        return rotated.gather(2, best[:, None].expand(-1, layer.head_dim, -1))

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        few = group_queries(queries, self.layer) @ self._skew
        indexed = self.paged.indexed
        logits = few @ self._keys[:, : max(indexed)].transpose(1, 2) * self.layer.scaling
        return self._result(mask_missing(logits.flatten(0, 1), indexed), count)

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        return self._result(mask_missing(self.logits(queries, entries), self.paged.indexed), count)

    def _result(self, logits: Float[Tensor, "H M"], count: int) -> RecallResult:
        """Equal number of best entries for every kv head; all of a head where they fit."""
        indexed = torch.tensor(self.paged.indexed)
        if not logits.shape[1]:
            return RecallResult(torch.empty(len(indexed), 0, dtype=torch.int64))
        below = logits - logits.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        near = int((below > -self._part.alpha).sum(1).float().mean())
        most = max(1, min(near, int(self._part.most * int(indexed.max())), count))
        scores = below.view(len(indexed), self.layer.group, -1).amax(1)
        pages = top_rows(scores, count)
        left_out = (torch.arange(pages.shape[1]) >= most) & (indexed > count)[:, None]
        return RecallResult(pages.masked_fill(left_out, -1))


Part = InfiniGen
