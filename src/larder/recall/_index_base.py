"""Pages of entries that follow each other: page p holds entries p * size to (p + 1) * size - 1.

The base of every part that takes pages in the order of time. Nothing is stored but how many entries
each head has. What is in a page changes only by growing, so its fill tells how often it did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from larder.core.observation import Entries
from larder.core.recall import RecallIndex
from larder.core.spec import LayerSpec
from larder.recall._coming import check_new_entries


@dataclass
class ContiguousPages:
    """Which entries stand in which page.

    Args:
        lengths: entries of each kv head.
    """

    size: int
    lengths: Int64[Tensor, " K"]

    @property
    def known(self) -> tuple[int, ...]:
        return tuple(self.lengths.tolist())

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(-(-length // self.size) for length in self.known)

    def contents(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P S"]:
        numbers = pages[..., None] * self.size + torch.arange(self.size)
        missing = (pages[..., None] < 0) | (numbers >= self._owned(pages)[..., None])
        return numbers.masked_fill(missing, -1)

    def fills(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P"]:
        """Entries in each page."""
        left = self._owned(pages) - pages * self.size
        return left.clamp(0, self.size).masked_fill(pages < 0, 0)

    def _owned(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N 1"]:
        """Entries of the kv head that each set belongs to."""
        return self.lengths.repeat_interleave(len(pages) // len(self.lengths))[:, None]


class ContiguousIndex(RecallIndex):
    """An index over such pages. Subclasses find, and digest what comes in `_digest`.

    Args:
        page: entries of a page.
    """

    def __init__(self, layer: LayerSpec, page: int) -> None:
        self.layer = layer
        self.page = page
        self.paged = ContiguousPages(page, torch.zeros(layer.kv_heads, dtype=torch.int64))

    def add(self, entries: Entries, queries: Tensor | None = None) -> None:
        known = self.paged.known
        check_new_entries(entries, known, self.layer.index)
        self._digest(entries, known, queries)
        self.paged = ContiguousPages(self.page, torch.tensor(entries.lengths))

    def _digest(self, entries: Entries, known: tuple[int, ...], queries: Tensor | None) -> None:
        """Take up entries behind the known ones; nothing here, where the keys say all."""

    def contents(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P S"]:
        return self.paged.contents(pages)

    def versions(self, pages: Int64[Tensor, "N P"]) -> Int64[Tensor, "N P"]:
        return self.paged.fills(pages)

    @property
    def counts(self) -> tuple[int, ...]:
        return self.paged.counts

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.paged.lengths,)

    def state(self) -> dict[str, Tensor]:
        return {"lengths": self.paged.lengths.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Become the index that `state` came from."""
        self.paged = ContiguousPages(self.page, state["lengths"].clone())
