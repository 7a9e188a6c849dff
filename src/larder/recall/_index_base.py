"""Base classes of recall indexes over contiguous pages and single entries, and shared helpers.

Page p of contiguous pages holds entries p * size to (p + 1) * size - 1. Only the number of entries
per head is stored. A page changes only by growing, so its number of entries is its version.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.recall import RecallIndex, RecallPart, RecallResult
from larder.core.spec import LayerSpec
from larder.ops.search import interleaved, page_max_scores, top_rows

MIN_COLUMNS = 64  # columns of the smallest table
GROWTH_SHARE = 4  # a table grows by at least 1 / GROWTH_SHARE: amortized cost per entry


@dataclass
class ContiguousPages:
    """Contents of contiguous pages.

    Args:
        lengths: entries of each kv head.
    """

    size: int
    lengths: Int64[Tensor, " K"]

    @property
    def indexed(self) -> tuple[int, ...]:
        return tuple(self.lengths.tolist())

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(-(-length // self.size) for length in self.indexed)

    def contents(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P S"]:
        numbers = pages[..., None] * self.size + torch.arange(self.size)
        missing = (pages[..., None] < 0) | (numbers >= self._owned(pages)[..., None])
        return numbers.masked_fill(missing, -1)

    def fills(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P"]:
        """Number of entries in each page."""
        left = self._owned(pages) - pages * self.size
        return left.clamp(0, self.size).masked_fill(pages < 0, 0)

    def _owned(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N 1"]:
        """Entries of the kv head of each set."""
        return self.lengths.repeat_interleave(len(pages) // len(self.lengths))[:, None]


class ContiguousIndex(RecallIndex):
    """Index over contiguous pages. Subclasses implement the search, and `_extend` for new entries.

    Args:
        page: entries of a page.
    """

    # Tensors that a subclass holds as `_<name>`, by name in a state, with the dimension in which
    # they have slack; None for no slack.
    tables: ClassVar[Mapping[str, int | None]] = {}

    def __init__(self, layer: LayerSpec, page: int) -> None:
        self.layer = layer
        self.page = page
        self.paged = ContiguousPages(page, torch.zeros(layer.kv_heads, dtype=torch.int64))

    def add(self, entries: Entries, queries: Tensor | None = None) -> None:
        indexed = self.paged.indexed
        check_new_entries(entries, indexed, self.layer.index)
        self._extend(entries, indexed, queries)
        self.paged = ContiguousPages(self.page, torch.tensor(entries.lengths))

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        """Add entries after the known ones; no effect where the search reads the keys."""

    def page_scores(self, queries: Float[Tensor, "H D"], entries: Entries) -> Float[Tensor, "H P"]:
        """Largest product of each query with the indexed keys of each page."""
        starts, lengths = indexed_layout(entries, self.paged.indexed)
        return page_max_scores(queries, entries.keys, starts, lengths, self.page)

    def contents(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P S"]:
        return self.paged.contents(pages)

    def versions(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P"]:
        return self.paged.fills(pages)

    @property
    def counts(self) -> tuple[int, ...]:
        return self.paged.counts

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.paged.lengths, *(getattr(self, f"_{name}") for name in self.tables))

    def state(self) -> dict[str, Tensor]:
        state = {"lengths": self.paged.lengths.clone()}
        for name, dim in self.tables.items():
            table: Tensor = getattr(self, f"_{name}")
            if dim is not None:
                table = table.narrow(dim, 0, self._table_length(name))
            state[name] = table.clone(memory_format=torch.contiguous_format)
        return state

    def _table_length(self, name: str) -> int:
        """Used size of a table in its dimension with slack: pages of the fullest head."""
        return max(self.counts)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore from the tensors of `state`."""
        self.paged = ContiguousPages(self.page, state["lengths"].clone())
        for name in self.tables:
            setattr(self, f"_{name}", state[name].clone())


def check_new_entries(entries: Entries, indexed: tuple[int, ...], layer: int) -> None:
    """Check new entries before an index changes anything.

    Args:
        indexed: indexed entries of each kv head.

    Raises:
        CacheError: a key is not finite, or a head has fewer entries than are indexed.
    """
    for head, (length, first) in enumerate(zip(entries.lengths, indexed, strict=True)):
        if length < first:
            raise CacheError(
                f"The recall index of layer {layer} has {first} entries of kv head {head}, but the "
                f"slow tier has {length}: entries never leave a slow tier; build a new index."
            )
    if _are_few_and_finite(entries, indexed):
        return
    for head, first in enumerate(indexed):
        coming = entries.keys_from(head, first)
        # The sum of finite keys is finite, except for overflow: then each key is checked.
        if not bool(coming.float().sum().isfinite()):
            _check_rows(coming.isfinite().all(-1), first, head, layer)


def _are_few_and_finite(entries: Entries, indexed: tuple[int, ...]) -> bool:
    """True if no head has more than one new key, as in a decode step, and all are finite."""
    new = [length - first for length, first in zip(entries.lengths, indexed, strict=True)]
    if entries.is_coded or max(new) > 1:
        return False
    layout = zip(entries.starts, indexed, new, strict=True)
    rows = [start + first for start, first, count in layout if count]
    return bool(entries.keys_at(torch.tensor(rows, dtype=torch.int64)).sum().isfinite())


def indexed_layout(
    entries: Entries, indexed: tuple[int, ...]
) -> tuple[Int64[Tensor, " K"], Int64[Tensor, " K"]]:
    """Starts, and lengths of the indexed entries, for kernels."""
    return entries.layout[0], torch.tensor(indexed)


def _check_rows(finite: Tensor, first: int, head: int, layer: int) -> None:
    if bool(finite.all()):
        return
    entry = first + int((~finite).int().argmax())
    raise CacheError(
        f"The key of entry {entry} of kv head {head} in layer {layer} has NaN or infinity, and "
        "no search finds such a key: check the model's weights and dtype."
    )


class EntryIndex(ContiguousIndex):
    """Index over single entries: pages of one entry, which never change."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer, 1)

    def logits(self, queries: Float[Tensor, "H D"], entries: Entries) -> Float[Tensor, "H M"]:
        """Attention logits of all indexed entries."""
        return self.page_scores(queries, entries).mul_(self.layer.scaling)

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        """Entries of the largest products of each query head, by reading all keys."""
        return RecallResult(top_rows(self.logits(queries, entries), count))


@dataclass(frozen=True)
class EntryRecall(RecallPart):
    """Recall part whose index is an `EntryIndex`."""

    @property
    def page(self) -> int:
        return 1

    @abstractmethod
    def index(self, layer: LayerSpec) -> EntryIndex: ...


def group_queries(queries: Float[Tensor, "H D"], layer: LayerSpec) -> Float[Tensor, "K R D"]:
    """Float32 queries grouped by kv head."""
    return queries.float().view(layer.kv_heads, layer.group, layer.head_dim)


def mask_missing(scores: Float[Tensor, "N M"], counts: tuple[int, ...]) -> Float[Tensor, "N M"]:
    """Scores with -inf after the last entry or page of the row's kv head; in place."""
    if min(counts) < scores.shape[1]:
        owned = torch.tensor(counts).repeat_interleave(len(scores) // len(counts))
        scores.masked_fill_(torch.arange(scores.shape[1]) >= owned[:, None], -torch.inf)
    return scores


def softmax_weights(logits: Float[Tensor, "N M"]) -> Float[Tensor, "N M"]:
    """Softmax of every row; zeros in an empty row."""
    return torch.softmax(logits, dim=1).nan_to_num_(0.0)


def sum_group_weights(
    weights: Float[Tensor, "H M"], counts: tuple[int, ...]
) -> Float[Tensor, "K M"]:
    """Weights summed over the query heads of each kv head, -inf for missing entries."""
    heads, columns = len(counts), weights.shape[1]
    return mask_missing(weights.view(heads, len(weights) // heads, columns).sum(1), counts)


def grow_table(table: Tensor, needed: int, dim: int = 1) -> Tensor:
    """Table with capacity for `needed` along a dimension: itself, or a larger zero-padded copy."""
    room = table.shape[dim]
    if needed <= room:
        return table
    shape = list(table.shape)
    shape[dim] = max(needed, room + room // GROWTH_SHARE, MIN_COLUMNS)
    larger = table.new_zeros(shape)
    larger.narrow(dim, 0, room).copy_(table)
    return larger


def trim_table(table: Tensor, needed: int) -> Tensor:
    """Copy of a table without slack in its second dimension."""
    return table[:, :needed].clone(memory_format=torch.contiguous_format)


class QueryHeadRule(Enum):
    """Combination of the scores of query heads.

    OWN: one set per query head.
    INTERLEAVED: one set per kv head: the best page of each of its query heads, then their second
        best, and so on, without repeats (IceCache).
    SUM, MEAN, MAX: one set per kv head, by the combined scores of its query heads.
    LAYER_SUM, LAYER_MEAN, LAYER_MAX: one set for all, by the combined scores of all query heads.
        Pages that a kv head lacks count for the others only.
    """

    OWN = "own"
    INTERLEAVED = "interleaved"
    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    LAYER_SUM = "layer_sum"
    LAYER_MEAN = "layer_mean"
    LAYER_MAX = "layer_max"


def select_pages(
    scores: Float[Tensor, "H N"], kv_heads: int, rule: QueryHeadRule, count: int
) -> Int64[Tensor, "F P"]:
    """At most `count` pages per set, the best first, in the form of `RecallResult.pages`."""
    if rule is QueryHeadRule.OWN:
        return top_rows(scores, count)
    if rule is QueryHeadRule.INTERLEAVED:
        return interleaved(top_rows(scores, count), kv_heads, count)
    return top_rows(combine_scores(scores, kv_heads, rule), count)


def combine_scores(
    scores: Float[Tensor, "H N"], kv_heads: int, rule: QueryHeadRule
) -> Float[Tensor, "K N"]:
    """Combined scores of a group, or of all heads; not for OWN and INTERLEAVED."""
    groups = scores.view(kv_heads, len(scores) // kv_heads, scores.shape[1])  # [K, R, N]
    if rule is QueryHeadRule.MAX:
        return groups.amax(1)
    if rule is QueryHeadRule.SUM:
        return groups.sum(1)
    if rule is QueryHeadRule.MEAN:
        return groups.mean(1)
    lacks = groups.isneginf().all(1)
    return _layer_scores(scores, rule).expand(kv_heads, -1).masked_fill(lacks, -torch.inf)


def _layer_scores(scores: Float[Tensor, "H N"], rule: QueryHeadRule) -> Float[Tensor, " N"]:
    if rule is QueryHeadRule.LAYER_MAX:
        return scores.amax(0)
    has = ~scores.isneginf()
    total = scores.masked_fill(~has, 0.0).sum(0)
    return total if rule is QueryHeadRule.LAYER_SUM else total / has.sum(0).clamp(min=1)
